//! Where an axis begins and ends, and which numbers stand at it.

/// An axis over finite values.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Axis {
    pub(super) low: f64,
    pub(super) high: f64,
    /// Values with their labels.
    pub(super) ticks: Vec<(f64, String)>,
}

impl Axis {
    /// Makes an axis from a multiple of its step below `low` to one above `high`.
    pub(super) fn around(low: f64, high: f64) -> Self {
        let (low, high) = if low < high { (low, high) } else { widened(low) };
        let step = step_of((high - low) / 5.0);
        let (first, last) = ((low / step).floor(), (high / step).ceil());
        Self::new(first * step, last * step, step)
    }

    /// Makes an axis of steps that ends where the values do.
    pub(super) fn of_steps(low: u64, high: u64) -> Self {
        let high = high.max(low + 1);
        let step = step_of((high - low) as f64 / 8.0).max(1.0);
        Self::new(low as f64, high as f64, step)
    }

    fn new(low: f64, high: f64, step: f64) -> Self {
        let largest = low.abs().max(high.abs());
        let mut ticks = Vec::new();
        let mut number = (low / step - 1e-9).ceil();
        // A bound for steps that are lost beside the values.
        while number * step <= high + step * 1e-9 && ticks.len() < 20 {
            let value = number * step;
            ticks.push((value, label(value, step, largest)));
            number += 1.0;
        }
        Self { low, high, ticks }
    }

    /// Returns where a value lies, from 0 to 1.
    pub(super) fn place(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }
}

/// A range around a single value.
fn widened(value: f64) -> (f64, f64) {
    match value.abs() {
        0.0 => (0.0, 1.0),
        size => (value - size / 2.0, value + size / 2.0),
    }
}

/// The least of 1, 2 and 5 times a power of ten that is not below `width`.
fn step_of(width: f64) -> f64 {
    let power = 10f64.powf(width.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|times| times * power);
    steps
        .into_iter()
        .find(|step| *step >= width * (1.0 - 1e-9))
        .unwrap_or(10.0 * power)
}

fn label(value: f64, step: f64, largest: f64) -> String {
    let places = |step: f64| (-(step.log10() + 1e-9).floor()).max(0.0) as usize;
    if value.abs() < step / 2.0 {
        "0".into()
    } else if (1e-2..1e6).contains(&largest) {
        format!("{value:.*}", places(step))
    } else {
        let power = value.abs().log10().floor();
        format!(
            "{:.*}e{power}",
            places(step / 10f64.powf(power)),
            value / 10f64.powf(power)
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<&str> {
        axis.ticks.iter().map(|(_, label)| label.as_str()).collect()
    }

    #[test]
    fn labels_are_round_and_their_axis_holds_all_values() {
        assert_eq!(labels(&Axis::around(2.57, 5.5)), ["2", "3", "4", "5", "6"]);
        assert_eq!(
            labels(&Axis::around(0.0, 1.0)),
            ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"].map(|label| if label == "0.0" { "0" } else { label })
        );
        assert_eq!(labels(&Axis::around(0.0, 3e-3)), ["0", "1e-3", "2e-3", "3e-3"]);
        assert_eq!(
            labels(&Axis::around(1.2e7, 1.9e7)),
            ["1.2e7", "1.4e7", "1.6e7", "1.8e7", "2.0e7"]
        );
        assert_eq!(labels(&Axis::of_steps(0, 59)), ["0", "10", "20", "30", "40", "50"]);
        assert_eq!(labels(&Axis::of_steps(3, 3)), ["3", "4"]);
    }

    #[test]
    fn no_values_make_an_axis_without_an_end() {
        for (low, high) in [
            (0.0, 0.0),
            (1.0, 1.0),
            (-3.0, -3.0),
            (1e300, 1e301),
            (1.0, 1.0 + 1e-15),
            (-1e-300, 1e-300),
        ] {
            let axis = Axis::around(low, high);
            assert!(
                axis.low <= low && axis.high >= high && axis.low < axis.high,
                "{low} {high}: {axis:?}"
            );
            assert!(axis.ticks.len() <= 20);
        }
    }
}
