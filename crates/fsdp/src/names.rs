//! How values are spelt in flags, variables and configuration files: by FSDP's names.

/// A value that has a name in FSDP or Accelerate.
///
/// ```
/// use sconce_fsdp::{FsdpStrategy, Named};
///
/// assert_eq!(FsdpStrategy::from_name("shard_grad_op"), Some(FsdpStrategy::ShardGradOp));
/// assert_eq!(FsdpStrategy::from_name("2"), Some(FsdpStrategy::ShardGradOp));
/// assert_eq!(FsdpStrategy::ShardGradOp.name(), "SHARD_GRAD_OP");
/// assert_eq!(FsdpStrategy::from_name("6"), None);
/// ```
pub trait Named: Copy + PartialEq + 'static {
    /// All values with their names, in the order by which Accelerate numbers them from 1.
    const NAMES: &'static [(&'static str, Self)];
    /// Whether a value may be given by its number too.
    const HAS_NUMBERS: bool = false;

    /// Finds the value of a name, in capitals or not.
    fn from_name(text: &str) -> Option<Self> {
        let of_name = || Self::NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
        let of_number = || {
            let number: usize = text.parse().ok().filter(|_| Self::HAS_NUMBERS)?;
            Self::NAMES.get(number.checked_sub(1)?)
        };
        of_name().or_else(of_number).map(|(_, value)| *value)
    }

    /// Returns the name.
    fn name(self) -> &'static str {
        let of_value = Self::NAMES.iter().find(|(_, value)| *value == self);
        of_value.map_or("", |(name, _)| name)
    }

    /// Says which names there are, for messages.
    fn expected() -> String {
        let names = Vec::from_iter(Self::NAMES.iter().map(|(name, _)| *name));
        let numbers = match Self::HAS_NUMBERS {
            true => format!(", or its number from 1 to {}", names.len()),
            false => String::new(),
        };
        match names.split_last() {
            Some((last, [])) => format!("expected {last}{numbers}"),
            Some((last, others)) => format!("expected {} or {last}{numbers}", others.join(", ")),
            None => String::new(),
        }
    }
}
