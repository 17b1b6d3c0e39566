//! The dtype in which layers compute products on this thread, where it is another than that of their parameters.
//!
//! It is here, and not with the layers, because a part that is [computed again](crate::EngineOptions::recompute) in the
//! backward must compute as it did, outside of the scope in which its forward ran.

use candle_core::DType;
use std::cell::Cell;

/// What layers of `sconce_core::nn` on this thread compute products in: PyTorch's autocast.
///
/// ```
/// use candle_core::DType;
/// use sconce_zero::Autocast;
///
/// assert_eq!(Autocast::current().dtype(), None);
/// let inside = Autocast::to(DType::BF16).during(|| Autocast::current().dtype());
/// assert_eq!(inside, Some(DType::BF16));
/// assert_eq!(Autocast::current().dtype(), None);
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Autocast {
    dtype: Option<DType>,
}

thread_local! {
    static CURRENT: Cell<Autocast> = const { Cell::new(Autocast { dtype: None }) };
}

impl Autocast {
    /// Returns the setting under which products are computed in the dtype of the tensors.
    pub fn off() -> Self {
        Self::default()
    }

    /// Returns the setting under which products of f32 are computed in `dtype`.
    pub fn to(dtype: DType) -> Self {
        Self { dtype: Some(dtype) }
    }

    /// Returns the setting of this thread; off where no scope is open.
    pub fn current() -> Self {
        CURRENT.get()
    }

    /// Returns the dtype of products, if it is not that of the tensors.
    pub fn dtype(self) -> Option<DType> {
        self.dtype
    }

    /// Does `work` under this setting, then goes on with the thread's own. Scopes may lie within each other; the innermost
    /// counts.
    pub fn during<R>(self, work: impl FnOnce() -> R) -> R {
        let _end = Restore(CURRENT.replace(self));
        work()
    }
}

/// Ends a scope, also when its work panics.
struct Restore(Autocast);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_scope_counts_and_a_panic_ends_it() {
        Autocast::to(DType::F16).during(|| {
            Autocast::off().during(|| assert_eq!(Autocast::current().dtype(), None));
            let outcome = std::panic::catch_unwind(|| Autocast::to(DType::BF16).during(|| panic!("inside")));
            assert!(outcome.is_err());
            assert_eq!(Autocast::current(), Autocast::to(DType::F16));
        });
        assert_eq!(Autocast::current(), Autocast::off());
    }
}
