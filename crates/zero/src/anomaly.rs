//! The first gradient of a backward that is not finite, for those who look for where a run breaks.
//!
//! Gradients come in from the loss towards the inputs, each when all uses of its parameter have contributed. What is not
//! finite spreads from where it arose to everything that comes after. So the first parameter in that order lies behind the
//! place, and those that came before it do not.

use crate::bucket::BLOCK;
use crate::overflow::is_finite;
use crate::{Error, ParameterInfo};
use rayon::prelude::*;
use std::fmt;

/// The first gradient of a backward that was not finite, in the order in which gradients came in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anomaly {
    /// The parameter's name.
    pub parameter: String,
    /// Elements of its gradient that are not a number.
    pub nan: usize,
    /// Elements that are infinite.
    pub infinite: usize,
    /// All elements.
    pub elements: usize,
    /// The parameter whose gradient came in just before, and was finite.
    pub before: Option<String>,
}

impl fmt::Display for Anomaly {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            parameter,
            nan,
            infinite,
            elements,
            before,
        } = self;
        write!(
            formatter,
            "the gradient of {parameter:?} is the first that is not finite: "
        )?;
        write!(formatter, "{nan} NaN and {infinite} infinite of {elements} elements; ")?;
        match before {
            Some(before) => write!(formatter, "that of {before:?}, which came before it, was finite"),
            None => write!(formatter, "no other came before it"),
        }
    }
}

/// Looks at gradients as they come in.
#[derive(Debug, Default)]
pub(crate) struct AnomalyWatch {
    /// Whether a gradient that is not finite ends the backward.
    ends_backward: bool,
    before: Option<String>,
    found: Option<Anomaly>,
}

impl AnomalyWatch {
    pub(crate) fn new(ends_backward: bool) -> Self {
        Self {
            ends_backward,
            ..Self::default()
        }
    }

    /// Forgets the last backward.
    pub(crate) fn begin(&mut self) {
        (self.before, self.found) = (None, None);
    }

    /// Returns what was found in the last backward.
    pub(crate) fn found(&self) -> Option<Anomaly> {
        self.found.clone()
    }

    /// Takes note of a gradient.
    ///
    /// # Errors
    /// [`Error::GradientAnomaly`] for the first that is not finite, if that ends the backward.
    pub(crate) fn look_at(&mut self, parameter: &ParameterInfo, gradient: &[f32]) -> Result<(), Error> {
        if self.found.is_some() {
            return Ok(());
        }
        if gradient.par_chunks(BLOCK).all(is_finite) {
            self.before = Some(parameter.name.clone());
            return Ok(());
        }
        let count = |rule: fn(&f32) -> bool| gradient.iter().filter(|value| rule(value)).count();
        let anomaly = Anomaly {
            parameter: parameter.name.clone(),
            nan: count(|value| value.is_nan()),
            infinite: count(|value| value.is_infinite()),
            elements: gradient.len(),
            before: self.before.take(),
        };
        self.found = Some(anomaly.clone());
        if self.ends_backward {
            return Err(Error::GradientAnomaly { anomaly });
        }
        tracing::warn!("{anomaly}; the step will be skipped");
        Ok(())
    }
}
