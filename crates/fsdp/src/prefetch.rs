//! FSDP's names of when units are gathered ahead of their backward.

use crate::Named;
use sconce_zero::BackwardPrefetch;

impl Named for BackwardPrefetch {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("BACKWARD_PRE", Self::Pre),
        ("BACKWARD_POST", Self::Post),
        ("NO_PREFETCH", Self::None),
    ];
}
