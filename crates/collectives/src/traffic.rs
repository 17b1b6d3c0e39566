//! How much a group has moved, by kind of operation.

use crate::collective::{Kind, Signature};

/// What one kind of operation has moved since the group was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// The operation.
    pub kind: Kind,
    /// How often it was called.
    pub calls: u64,
    /// Elements of the whole buffers together: for reduce-scatter and all-gather those of all ranks.
    pub elements: u64,
    /// The same in bytes.
    pub bytes: u64,
}

impl Traffic {
    /// Returns the elements that each rank sends in a bandwidth-optimal algorithm, but for the factor (n - 1) / n: twice
    /// the buffer for an all-reduce, once for every other operation. These are the units of ZeRO's "2P" and "3P".
    pub fn volume(&self) -> u64 {
        if self.kind == Kind::AllReduce {
            2 * self.elements
        } else {
            self.elements
        }
    }
}

/// Counters of one group on one rank.
#[derive(Debug, Default)]
pub(crate) struct TrafficCounters {
    by_kind: [Counter; Kind::CODES],
}

#[derive(Debug, Default)]
struct Counter {
    calls: u64,
    elements: u64,
    bytes: u64,
}

impl TrafficCounters {
    pub(crate) fn count(&mut self, signature: &Signature) {
        let counter = &mut self.by_kind[signature.kind as usize];
        let size = signature.element.map_or(0, |element| element.size() as u64);
        counter.calls += 1;
        counter.elements += signature.count;
        counter.bytes += signature.count * size;
    }

    /// Returns the kinds that were called, in the order of their codes.
    pub(crate) fn read(&self) -> Vec<Traffic> {
        let of_code = |(code, counter): (usize, &Counter)| {
            Kind::from_code(code as u8).map(|kind| Traffic {
                kind,
                calls: counter.calls,
                elements: counter.elements,
                bytes: counter.bytes,
            })
        };
        let all = self.by_kind.iter().enumerate().filter_map(of_code);
        all.filter(|traffic| traffic.calls > 0).collect()
    }
}
