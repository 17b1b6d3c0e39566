//! One call of one operation: its buffers, its checks on one rank, and the signature that ranks compare.

use crate::{ElementType, Elements, ElementsMut, Error, ReduceOp, Result};

/// How many elements belong to each rank.
#[derive(Debug, Clone, Copy)]
pub enum Counts<'a> {
    /// The same number for every rank.
    Equal(usize),
    /// One number per rank; the slice has the length of the group.
    Each(&'a [usize]),
}

impl Counts<'_> {
    /// Returns the number of elements that belong to `rank`.
    pub fn of(&self, rank: usize) -> usize {
        match self {
            Self::Equal(count) => *count,
            Self::Each(counts) => counts[rank],
        }
    }

    /// Returns the index of the first element that belongs to `rank`.
    pub fn offset(&self, rank: usize) -> usize {
        match self {
            Self::Equal(count) => count * rank,
            Self::Each(counts) => counts[..rank].iter().sum(),
        }
    }

    /// Returns the number of elements of all `size` ranks together.
    pub fn total(&self, size: usize) -> usize {
        self.offset(size)
    }

    /// Returns the largest number of elements of one rank.
    pub fn largest(&self) -> usize {
        match self {
            Self::Equal(count) => *count,
            Self::Each(counts) => counts.iter().copied().max().unwrap_or(0),
        }
    }

    fn digest(&self) -> u32 {
        match self {
            Self::Equal(_) => 0,
            Self::Each(counts) => {
                // FNV-1a, folded to 24 bits; 0 is kept for `Equal`.
                let hash = counts.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &count| {
                    (hash ^ count as u64).wrapping_mul(0x0100_0000_01b3)
                });
                ((hash ^ (hash >> 24) ^ (hash >> 48)) as u32 & 0x00ff_ffff).max(1)
            }
        }
    }

    fn fits(&self, size: usize) -> bool {
        match self {
            Self::Equal(_) => true,
            Self::Each(counts) => counts.len() == size,
        }
    }
}

/// One operation on one rank, with its buffers.
///
/// `counts` say how many elements of the whole belong to each rank; they must be the same on all ranks, except those
/// of [`Collective::AllToAll`].
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are described by the variants")]
pub enum Collective<'a> {
    /// Returns when all ranks have called it.
    Barrier,
    /// Every rank's `buffer` becomes the reduction of all buffers.
    AllReduce { buffer: ElementsMut<'a>, op: ReduceOp },
    /// `buffer` of `root` becomes the reduction of all buffers; the others stay as they are.
    Reduce {
        buffer: ElementsMut<'a>,
        op: ReduceOp,
        root: usize,
    },
    /// Rank r's `output` becomes the r-th part of the reduction of all `input`s.
    ReduceScatter {
        input: Elements<'a>,
        output: ElementsMut<'a>,
        op: ReduceOp,
        counts: Counts<'a>,
    },
    /// The r-th part of rank r's `buffer` becomes that part of the reduction; the other parts stay as they are.
    ReduceScatterInPlace {
        buffer: ElementsMut<'a>,
        op: ReduceOp,
        counts: Counts<'a>,
    },
    /// Every rank's `output` becomes all `input`s in rank order.
    AllGather {
        input: Elements<'a>,
        output: ElementsMut<'a>,
        counts: Counts<'a>,
    },
    /// Part r of every rank's `buffer` becomes rank r's part r; ranks agree on `label`, if there is one.
    AllGatherInPlace {
        buffer: ElementsMut<'a>,
        counts: Counts<'a>,
        label: Option<u32>,
    },
    /// Every rank's `each` gets every rank's `input`, in any order; ranks agree on `label`.
    AllGatherEach {
        input: Elements<'a>,
        counts: Counts<'a>,
        label: u32,
        each: Each<'a>,
    },
    /// Every rank's `buffer` becomes that of `root`.
    Broadcast { buffer: ElementsMut<'a>, root: usize },
    /// `root`'s `output` (given there only) becomes all `input`s in rank order.
    Gather {
        input: Elements<'a>,
        output: Option<ElementsMut<'a>>,
        counts: Counts<'a>,
        root: usize,
    },
    /// Rank r's `output` becomes the r-th part of `root`'s `input` (given there only).
    Scatter {
        input: Option<Elements<'a>>,
        output: ElementsMut<'a>,
        counts: Counts<'a>,
        root: usize,
    },
    /// Part s of rank r's `input` becomes part r of rank s's `output`.
    AllToAll {
        input: Elements<'a>,
        output: ElementsMut<'a>,
        send: Counts<'a>,
        receive: Counts<'a>,
    },
    /// Sends to one rank and receives from one rank, in any order that makes progress.
    SendReceive {
        send: Option<(Elements<'a>, usize)>,
        receive: Option<(ElementsMut<'a>, usize)>,
    },
}

/// What is done with each rank's elements: called with the rank and its elements, which live no longer than the call.
pub struct Each<'a>(pub &'a mut dyn FnMut(usize, Elements<'_>));

impl std::fmt::Debug for Each<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Each")
    }
}

impl Collective<'_> {
    /// Returns how errors write the label of a [`Collective::AllGatherEach`]; for callers who know what it stands for.
    pub fn written_label(label: u32) -> String {
        written(digest_of_label(label))
    }

    /// Checks what one rank can check alone: ranks in range, lengths that fit the counts, equal types.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the operation, what was given and what was expected.
    pub fn check(&self, rank: usize, size: usize) -> Result<()> {
        let operation = self.kind().name();
        let fail = |reason: String| {
            Err(Error::Argument {
                rank,
                operation,
                reason,
            })
        };
        let length = |what: &str, got: usize, expected: usize, why: &str| {
            if got == expected {
                Ok(())
            } else {
                fail(format!("{what} has {got} elements, expected {expected} ({why})"))
            }
        };
        let types = |a: ElementType, b: ElementType| {
            if a == b {
                Ok(())
            } else {
                fail(format!(
                    "input is {} but output is {}; both must have one type",
                    a.name(),
                    b.name()
                ))
            }
        };
        let in_range = |what: &str, value: usize| {
            if value < size {
                Ok(())
            } else {
                fail(format!("{what} {value} is not below the group's size {size}"))
            }
        };
        if let Some(counts) = self.counts()
            && !counts.fits(size)
        {
            return fail(format!("one count per rank expected, {size} in all"));
        }
        if let (Some(ReduceOp::Mean), Some(element)) = (self.reduce_op(), self.element())
            && !element.is_float()
        {
            return fail(format!("mean of {}: use sum, or a floating-point type", element.name()));
        }
        if let Some(root) = self.root() {
            in_range("root", root)?;
        }
        match self {
            Self::Barrier | Self::AllReduce { .. } | Self::Reduce { .. } | Self::Broadcast { .. } => Ok(()),
            Self::ReduceScatter {
                input, output, counts, ..
            } => {
                types(input.element(), output.element())?;
                length("input", input.len(), counts.total(size), "all ranks' counts together")?;
                length("output", output.len(), counts.of(rank), "this rank's count")
            }
            Self::AllGather { input, output, counts } => {
                types(input.element(), output.element())?;
                length("input", input.len(), counts.of(rank), "this rank's count")?;
                length("output", output.len(), counts.total(size), "all ranks' counts together")
            }
            Self::ReduceScatterInPlace { buffer, counts, .. } | Self::AllGatherInPlace { buffer, counts, .. } => {
                length("buffer", buffer.len(), counts.total(size), "all ranks' counts together")
            }
            Self::AllGatherEach { input, counts, .. } => {
                length("input", input.len(), counts.of(rank), "this rank's count")
            }
            Self::Gather {
                input,
                output,
                counts,
                root,
            } => {
                length("input", input.len(), counts.of(rank), "this rank's count")?;
                match output {
                    Some(output) if rank == *root => {
                        types(input.element(), output.element())?;
                        length("output", output.len(), counts.total(size), "all ranks' counts together")
                    }
                    None if rank != *root => Ok(()),
                    _ => fail(format!("output must be given on the root (rank {root}) and only there")),
                }
            }
            Self::Scatter {
                input,
                output,
                counts,
                root,
            } => {
                length("output", output.len(), counts.of(rank), "this rank's count")?;
                match input {
                    Some(input) if rank == *root => {
                        types(input.element(), output.element())?;
                        length("input", input.len(), counts.total(size), "all ranks' counts together")
                    }
                    None if rank != *root => Ok(()),
                    _ => fail(format!("input must be given on the root (rank {root}) and only there")),
                }
            }
            Self::AllToAll {
                input,
                output,
                send,
                receive,
            } => {
                types(input.element(), output.element())?;
                if !receive.fits(size) {
                    return fail(format!("one count per rank expected, {size} in all"));
                }
                length("input", input.len(), send.total(size), "the send counts together")?;
                length(
                    "output",
                    output.len(),
                    receive.total(size),
                    "the receive counts together",
                )?;
                length(
                    "the part kept",
                    receive.of(rank),
                    send.of(rank),
                    "this rank's own send count",
                )
            }
            Self::SendReceive { send, receive } => {
                for (what, peer) in [
                    ("to", send.as_ref().map(|s| s.1)),
                    ("from", receive.as_ref().map(|r| r.1)),
                ] {
                    let Some(peer) = peer else { continue };
                    in_range(what, peer)?;
                    if peer == rank {
                        return fail(format!("{what} {peer} is this rank itself; copy instead"));
                    }
                }
                Ok(())
            }
        }
    }

    /// Returns what all ranks must agree on.
    pub fn signature(&self, size: usize) -> Signature {
        let count = match self {
            Self::Barrier => 0,
            Self::AllReduce { buffer, .. } | Self::Reduce { buffer, .. } | Self::Broadcast { buffer, .. } => {
                buffer.len()
            }
            Self::AllToAll {
                send: Counts::Each(_), ..
            } => 0,
            Self::SendReceive {
                send: Some((send, _)), ..
            } => send.len(),
            Self::SendReceive { receive, .. } => receive.as_ref().map_or(0, |r| r.0.len()),
            _ => self.counts().map_or(0, |counts| counts.total(size)),
        };
        let digest = match self {
            Self::AllToAll {
                send: Counts::Each(_), ..
            } => 1,
            Self::AllGatherEach { label, .. } | Self::AllGatherInPlace { label: Some(label), .. } => {
                digest_of_label(*label)
            }
            _ => self.counts().map_or(0, |counts| counts.digest()),
        };
        Signature {
            kind: self.kind(),
            element: self.element(),
            op: self.reduce_op(),
            root: self.root(),
            digest,
            count: count as u64,
        }
    }

    /// Returns the kind of operation.
    pub fn kind(&self) -> Kind {
        match self {
            Self::Barrier => Kind::Barrier,
            Self::AllReduce { .. } => Kind::AllReduce,
            Self::Reduce { .. } => Kind::Reduce,
            Self::ReduceScatter { .. } => Kind::ReduceScatter,
            Self::ReduceScatterInPlace { .. } => Kind::ReduceScatterInPlace,
            Self::AllGather { .. } => Kind::AllGather,
            Self::AllGatherInPlace { .. } => Kind::AllGatherInPlace,
            Self::AllGatherEach { .. } => Kind::AllGatherEach,
            Self::Broadcast { .. } => Kind::Broadcast,
            Self::Gather { .. } => Kind::Gather,
            Self::Scatter { .. } => Kind::Scatter,
            Self::AllToAll { .. } => Kind::AllToAll,
            Self::SendReceive {
                send: Some(_),
                receive: Some(_),
            } => Kind::SendReceive,
            Self::SendReceive { send: Some(_), .. } => Kind::Send,
            Self::SendReceive { .. } => Kind::Receive,
        }
    }

    fn element(&self) -> Option<ElementType> {
        match self {
            Self::Barrier => None,
            Self::AllReduce { buffer, .. }
            | Self::Reduce { buffer, .. }
            | Self::ReduceScatterInPlace { buffer, .. }
            | Self::AllGatherInPlace { buffer, .. }
            | Self::Broadcast { buffer, .. } => Some(buffer.element()),
            Self::ReduceScatter { input, .. }
            | Self::AllGather { input, .. }
            | Self::AllGatherEach { input, .. }
            | Self::Gather { input, .. }
            | Self::AllToAll { input, .. } => Some(input.element()),
            Self::Scatter { output, .. } => Some(output.element()),
            Self::SendReceive { send, receive } => send
                .as_ref()
                .map(|s| s.0.element())
                .or_else(|| receive.as_ref().map(|r| r.0.element())),
        }
    }

    fn reduce_op(&self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce { op, .. }
            | Self::Reduce { op, .. }
            | Self::ReduceScatter { op, .. }
            | Self::ReduceScatterInPlace { op, .. } => Some(*op),
            _ => None,
        }
    }

    fn root(&self) -> Option<usize> {
        match self {
            Self::Reduce { root, .. }
            | Self::Broadcast { root, .. }
            | Self::Gather { root, .. }
            | Self::Scatter { root, .. } => Some(*root),
            _ => None,
        }
    }

    fn counts(&self) -> Option<&Counts<'_>> {
        match self {
            Self::ReduceScatter { counts, .. }
            | Self::ReduceScatterInPlace { counts, .. }
            | Self::AllGather { counts, .. }
            | Self::AllGatherInPlace { counts, .. }
            | Self::AllGatherEach { counts, .. }
            | Self::Gather { counts, .. }
            | Self::Scatter { counts, .. } => Some(counts),
            Self::AllToAll { send, .. } => Some(send),
            _ => None,
        }
    }
}

macro_rules! kinds {
    ($($kind:ident = $code:literal $name:literal,)*) => {
        /// The kind of an operation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[allow(missing_docs, reason = "the names are those of `Communicator`'s methods")]
        pub enum Kind { $($kind = $code,)* }

        impl Kind {
            /// One more than the largest code.
            pub(crate) const CODES: usize = [$($code),*].len() + 1;

            /// Returns the method's name.
            pub fn name(self) -> &'static str {
                match self { $(Self::$kind => $name,)* }
            }

            pub(crate) fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$kind),)* _ => None }
            }
        }
    };
}
kinds! {
    Barrier = 1 "barrier",
    AllReduce = 2 "all_reduce",
    Reduce = 3 "reduce",
    ReduceScatter = 4 "reduce_scatter",
    ReduceScatterInPlace = 5 "reduce_scatter_in_place",
    AllGather = 6 "all_gather",
    AllGatherInPlace = 7 "all_gather_in_place",
    Broadcast = 8 "broadcast",
    Gather = 9 "gather",
    Scatter = 10 "scatter",
    AllToAll = 11 "all_to_all",
    Send = 12 "send",
    Receive = 13 "receive",
    SendReceive = 14 "send_receive",
    Allocate = 15 "allocate",
    Split = 16 "split",
    AllGatherEach = 17 "all_gather_each",
}

/// What all ranks must agree on in one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    /// The operation.
    pub kind: Kind,
    /// The type of the elements, if any are moved.
    pub element: Option<ElementType>,
    /// The reduction, if one is made.
    pub op: Option<ReduceOp>,
    /// The root rank, if there is one.
    pub root: Option<usize>,
    /// A digest of unequal counts, 0 for equal ones.
    pub digest: u32,
    /// The number of elements of the whole.
    pub count: u64,
}

impl Signature {
    /// Makes the signature of an operation that moves no user data.
    pub(crate) fn of_kind(kind: Kind, count: u64) -> Self {
        Self {
            kind,
            element: None,
            op: None,
            root: None,
            digest: 0,
            count,
        }
    }

    /// Packs everything but the count: kind 8, element 8, op 8, digest 24, root 16 bits.
    pub(crate) fn pack(&self) -> u64 {
        let element = self.element.map_or(0, |element| element as u64 + 1);
        let op = self.op.map_or(0, |op| op as u64 + 1);
        let root = self.root.map_or(0, |root| (root as u64 + 1) & 0xffff);
        self.kind as u64 | element << 8 | op << 16 | u64::from(self.digest) << 24 | root << 48
    }

    /// Reads what [`Signature::pack`] wrote; `None` if a peer wrote nonsense.
    pub(crate) fn unpack(word: u64, count: u64) -> Option<Self> {
        let byte = |shift: u32| (word >> shift) as u8;
        let optional = |code: u8| code.checked_sub(1);
        Some(Self {
            kind: Kind::from_code(byte(0))?,
            element: optional(byte(8)).and_then(ElementType::from_code),
            op: optional(byte(16)).and_then(ReduceOp::from_code),
            root: ((word >> 48) as usize).checked_sub(1),
            digest: (word >> 24) as u32 & 0x00ff_ffff,
            count,
        })
    }
}

/// Returns the digest of a label; 0 and 1 are kept for other digests, as in `Counts::digest`.
fn digest_of_label(label: u32) -> u32 {
    label % 0x00ff_fffe + 2
}

fn written(digest_of_label: u32) -> String {
    format!("label #{digest_of_label:06x}")
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.kind.name())?;
        if let Some(op) = self.op {
            write!(f, "({})", op.name())?;
        }
        match self.element {
            Some(element) => write!(f, " of {} {}", self.count, element.name())?,
            None if self.count > 0 => write!(f, " of {}", self.count)?,
            None => {}
        }
        if self.digest > 1 {
            if self.kind == Kind::AllGatherEach {
                write!(f, " with {}", written(self.digest))?;
            } else {
                write!(f, " with counts #{:06x}", self.digest)?;
            }
        }
        if let Some(root) = self.root {
            write!(f, " with root {root}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_survives_packing() {
        let mut values = [0f32; 6];
        let all = [
            Collective::Barrier.signature(3),
            Collective::AllReduce {
                buffer: ElementsMut::new(&mut values),
                op: ReduceOp::Product,
            }
            .signature(3),
            Collective::Broadcast {
                buffer: ElementsMut::new(&mut [0u8; 5]),
                root: 2,
            }
            .signature(3),
            Collective::AllGatherInPlace {
                buffer: ElementsMut::new(&mut values),
                counts: Counts::Each(&[1, 2, 3]),
                label: None,
            }
            .signature(3),
        ];
        for signature in all {
            assert_eq!(Signature::unpack(signature.pack(), signature.count), Some(signature));
        }
    }

    #[test]
    fn different_counts_of_the_same_total_have_different_signatures() {
        let signature = |counts: &[usize]| {
            Collective::AllGatherInPlace {
                buffer: ElementsMut::new(&mut [0u8; 6]),
                counts: Counts::Each(counts),
                label: None,
            }
            .signature(3)
        };
        assert_ne!(signature(&[1, 2, 3]), signature(&[2, 1, 3]));
        assert_eq!(signature(&[1, 2, 3]), signature(&[1, 2, 3]));
    }
}
