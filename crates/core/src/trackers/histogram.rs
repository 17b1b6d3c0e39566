//! How often values lie in parts of their range.

/// A distribution of finite values, at least one.
#[derive(Debug)]
pub(super) struct Histogram {
    pub(super) low: f64,
    pub(super) high: f64,
    pub(super) number: f64,
    pub(super) sum: f64,
    pub(super) sum_of_squares: f64,
    /// Where each part ends; the last ends at `high`.
    pub(super) limits: Vec<f64>,
    pub(super) counts: Vec<f64>,
}

impl Histogram {
    /// Counts values in `parts` of equal width, or in one, where all are the same. Those that are not finite do not count;
    /// `None` where no other is left.
    pub(super) fn of(values: &[f64], parts: usize) -> Option<Self> {
        let values = Vec::from_iter(values.iter().copied().filter(|value| value.is_finite()));
        let low = values.iter().copied().reduce(f64::min)?;
        let high = values.iter().copied().reduce(f64::max)?;
        let parts = if low < high { parts } else { 1 };
        // Divided first: the difference of two finite numbers need not be finite.
        let width = high / parts as f64 - low / parts as f64;
        let mut counts = vec![0.0; parts];
        for value in &values {
            let part = if width > 0.0 {
                ((value / width) - (low / width)) as usize
            } else {
                0
            };
            counts[part.min(parts - 1)] += 1.0;
        }
        let end = |part: usize| {
            if part + 1 == parts {
                high
            } else {
                low + width * (part + 1) as f64
            }
        };
        Some(Self {
            low,
            high,
            number: values.len() as f64,
            sum: values.iter().sum(),
            sum_of_squares: values.iter().map(|value| value * value).sum(),
            limits: (0..parts).map(end).collect(),
            counts,
        })
    }

    /// Returns where the parts begin and end, in order. A single value lies in the middle of a part of width 1, as numpy has
    /// it.
    pub(super) fn edges(&self) -> Vec<f64> {
        if self.low < self.high {
            [&[self.low], &*self.limits].concat()
        } else {
            vec![self.low - 0.5, self.low + 0.5]
        }
    }
}
