//! How values of several ranks become one.

/// A reduction over the ranks, applied element by element in rank order.
///
/// The order is fixed (rank 0, 1, 2, ...), so all ranks and all runs get the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum; integers wrap.
    Sum = 0,
    /// The sum divided by the number of ranks, rounded once; floating-point types only.
    Mean = 1,
    /// The smallest value; NaN if any is NaN.
    Min = 2,
    /// The largest value; NaN if any is NaN.
    Max = 3,
    /// The product; integers wrap.
    Product = 4,
}

impl ReduceOp {
    /// All reductions.
    pub const ALL: [Self; 5] = [Self::Sum, Self::Mean, Self::Min, Self::Max, Self::Product];

    /// Returns the name used in messages, for example `sum`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::Min => "min",
            Self::Max => "max",
            Self::Product => "product",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|op| *op as u8 == code)
    }
}
