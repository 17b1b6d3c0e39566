//! What NCCL is to do with device memory in one operation.

use crate::parts::Part;
use crate::{ElementType, ReduceOp};

/// Calls of NCCL's that belong together, from this rank's input to its output. Parts are in bytes, one for each rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Plan {
    /// The output of every rank is the reduction of all inputs.
    AllReduce { element: ElementType, op: ReduceOp },
    /// The same on `root` only.
    Reduce {
        element: ElementType,
        op: ReduceOp,
        root: usize,
    },
    /// The output of rank r is part r of the reduction of all inputs.
    ReduceScatter {
        element: ElementType,
        op: ReduceOp,
        parts: Vec<Part>,
    },
    /// Part r of every output is the input of rank r.
    AllGather { parts: Vec<Part> },
    /// The output of every rank is the input of `root`.
    Broadcast { root: usize },
    /// Part r of the input goes to rank r, part r of the output comes from it; a rank's own parts stay out of it.
    Exchange { send: Vec<Part>, receive: Vec<Part> },
}

impl Plan {
    /// Says whether memory of these lengths is what the plan needs on `rank`, so that no call reaches outside of it.
    pub(super) fn fits(&self, rank: usize, size: usize, input: usize, output: usize) -> bool {
        let whole = |parts: &[Part]| parts.last().map_or(0, |part| part.end);
        let lie_in = |parts: &[Part], bytes: usize| {
            parts.len() == size && parts.iter().all(|part| part.start <= part.end && part.end <= bytes)
        };
        let elements = |element: &ElementType, bytes: usize| bytes.is_multiple_of(element.size());
        match self {
            Self::AllReduce { element, .. } => elements(element, input) && output == input,
            Self::Reduce { element, root, .. } => {
                let expected = if rank == *root { input } else { 0 };
                *root < size && elements(element, input) && output == expected
            }
            Self::ReduceScatter { element, parts, .. } => {
                let is_whole = lie_in(parts, input) && whole(parts) == input;
                is_whole && parts.iter().all(|part| elements(element, part.len())) && output == parts[rank].len()
            }
            Self::AllGather { parts } => lie_in(parts, output) && whole(parts) == output && input == parts[rank].len(),
            Self::Broadcast { root } => *root < size && output == input,
            Self::Exchange { send, receive } => lie_in(send, input) && lie_in(receive, output),
        }
    }
}

/// Says whether all parts are equally long, as NCCL's own gathers and scatters have them.
pub(super) fn are_equal(parts: &[Part]) -> bool {
    parts.windows(2).all(|pair| pair[0].len() == pair[1].len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_refuses_memory_that_it_would_reach_out_of() {
        let parts = vec![0..4, 4..12];
        let gather = Plan::AllGather { parts: parts.clone() };
        assert!(gather.fits(1, 2, 8, 12));
        assert!(!gather.fits(0, 2, 8, 12) && !gather.fits(1, 2, 8, 11) && !gather.fits(1, 3, 8, 12));
        let (element, op) = (ElementType::F32, ReduceOp::Sum);
        let scatter = Plan::ReduceScatter { element, op, parts };
        assert!(scatter.fits(0, 2, 12, 4) && !scatter.fits(0, 2, 12, 8) && !scatter.fits(0, 2, 16, 4));
        let reduce = Plan::Reduce { element, op, root: 1 };
        assert!(reduce.fits(0, 2, 8, 0) && reduce.fits(1, 2, 8, 8) && !reduce.fits(1, 2, 6, 6));
        let exchange = Plan::Exchange {
            send: vec![0..0, 0..4],
            receive: vec![0..0, 4..8],
        };
        assert!(exchange.fits(0, 2, 4, 8) && !exchange.fits(0, 2, 4, 7) && !exchange.fits(0, 2, 3, 8));
    }

    #[test]
    fn equal_parts_are_told_from_others() {
        assert!(are_equal(&[0..2, 2..4]) && !are_equal(&[0..2, 2..3]));
    }
}
