//! In which form a sharded model's state is saved.

use crate::Named;

/// The form in which state is saved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateDictType {
    /// Whole tensors, on rank 0.
    Full,
    /// Each rank's shares, in a form that its layout shows. Version 1 only.
    Local,
    /// Each rank's shares, with their place in the whole.
    Sharded,
}

impl Named for StateDictType {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("FULL_STATE_DICT", Self::Full),
        ("LOCAL_STATE_DICT", Self::Local),
        ("SHARDED_STATE_DICT", Self::Sharded),
    ];
    const HAS_NUMBERS: bool = true;
}
