//! The mean over all samples of a window, where micro-batches count differently many.
//!
//! The mean of several means is not the mean over all samples unless all have as many. What each micro-batch weighs is
//! known when it is differentiated, the sum of the weights only when the window ends. So losses are multiplied by their
//! weight and a factor, which is about the reciprocal of the sum to be expected (gradients of 16 bits need not grow), and
//! the gradients are corrected when the sum is known.

/// What the gradients held are a weighted sum of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct WeightedMean {
    /// The weights of all ranks so far.
    total: f64,
    /// What the gradient of a loss, times its weight, was multiplied by; the mean over the ranks included.
    factor: f64,
}

impl WeightedMean {
    /// Returns the mean after losses of all `ranks` came that weigh `weight` together; `before` is what is held.
    pub(crate) fn with(before: Option<Self>, weight: f64, ranks: usize) -> Self {
        let before = before.unwrap_or(Self {
            total: 0.0,
            factor: 1.0,
        });
        Self {
            total: before.total + weight,
            // As long as nothing weighs anything, what is held is zero, whatever its factor.
            factor: if before.total > 0.0 {
                before.factor
            } else {
                factor(ranks, weight)
            },
        }
    }

    /// Returns what a rank's loss, times its weight, is multiplied by.
    pub(crate) fn factor(self) -> f64 {
        self.factor
    }

    /// Returns what makes the sum held the mean, and what is held then.
    pub(crate) fn complete(self, ranks: usize) -> (f32, Self) {
        let correction = (factor(ranks, self.total) / self.factor) as f32;
        let factor = self.factor * f64::from(correction);
        (correction, Self { factor, ..self })
    }
}

/// Returns the factor of the mean itself, given that gradients are averaged over the ranks; 1 where nothing has weight.
fn factor(ranks: usize, total: f64) -> f64 {
    if total > 0.0 { ranks as f64 / total } else { 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_of_a_window_is_that_of_its_first_weight_until_it_is_complete() {
        let first = WeightedMean::with(None, 0.0, 2);
        assert_eq!((first.factor(), first.complete(2).0), (1.0, 1.0));
        let second = WeightedMean::with(Some(first), 8.0, 2);
        assert_eq!(second.factor(), 0.25);
        let third = WeightedMean::with(Some(second), 24.0, 2);
        assert_eq!(third.factor(), 0.25);
        let (correction, complete) = third.complete(2);
        assert_eq!((correction, complete.factor()), (0.25, 0.0625));
        // What is complete can be added to.
        assert_eq!(WeightedMean::with(Some(complete), 32.0, 2).complete(2).0, 0.5);
    }
}
