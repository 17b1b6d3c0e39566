//! The contract of every backend, and the typed operations that users call.
//!
//! A backend implements [`Communicator`], which is object-safe and small: one entry, [`Communicator::execute`], takes
//! any [`Collective`]. The methods that users call live on `dyn Communicator`, so every backend has the same.

use crate::{Buffer, Collective, Counts, Each, Element, Elements, ElementsMut, Pending, ReduceOp, Result, Traffic};
use std::sync::Arc;

/// Work that runs on a communicator behind the caller; see [`Communicator::start`].
pub type Job = Box<dyn FnOnce(&dyn Communicator) + Send>;

/// A group of ranks that exchange data.
///
/// All ranks of a group must call the same operations in the same order (point-to-point operations excepted). A rank
/// that calls another operation, dies or does not come turns into an error on every rank; the group is unusable
/// afterwards and every later call returns [`Error::Aborted`](crate::Error::Aborted).
///
/// Calls of one rank run in program order: a blocking call first waits for the jobs started before it.
pub trait Communicator: Send + Sync + std::fmt::Debug {
    /// Returns this process's (or thread's) number in the group.
    fn rank(&self) -> usize;

    /// Returns the number of ranks in the group.
    fn size(&self) -> usize;

    /// Returns the backend's name, for example `shm`.
    fn backend(&self) -> &'static str;

    /// Runs one operation and returns when its buffers may be used again.
    ///
    /// # Errors
    /// Wrong arguments, ranks that disagree, a lost peer, a passed deadline; see [`Error`](crate::Error).
    fn execute(&self, collective: Collective<'_>) -> Result<()>;

    /// Queues a job that runs behind the caller's other work, after the jobs queued before it.
    ///
    /// The job gets this same group and may call any operation on it. Most users want `run_behind`.
    fn start(&self, job: Job);

    /// Allocates `bytes` zeroed bytes where peers can reach them in place; called by all ranks with the same size.
    ///
    /// Operations on such a buffer need no staging copies.
    ///
    /// # Errors
    /// As [`Communicator::execute`], and when memory cannot be had.
    fn allocate(&self, bytes: usize) -> Result<Buffer>;

    /// Makes groups of the ranks that give the same `color`, ordered by `key` and then by rank; called by all ranks.
    ///
    /// A rank that gives `None` gets no group.
    ///
    /// # Errors
    /// As [`Communicator::execute`].
    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>>;

    /// Returns what this rank has moved in this group, by kind of operation; nothing in a group of one.
    fn traffic(&self) -> Vec<Traffic> {
        Vec::new()
    }

    /// Makes every rank's current or next operation fail with `reason`.
    fn abort(&self, reason: &str);
}

/// The operations, typed.
///
/// Counts are in elements. Every method returns an error as [`Communicator::execute`] does.
#[allow(
    clippy::missing_errors_doc,
    reason = "all share the errors of `Communicator::execute`, as said above"
)]
impl<'c> dyn Communicator + 'c {
    /// Replaces `buffer` on every rank by the reduction of all ranks' buffers.
    pub fn all_reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp) -> Result<()> {
        self.execute(Collective::AllReduce {
            buffer: ElementsMut::new(buffer),
            op,
        })
    }

    /// Replaces `buffer` on rank `root` by the reduction of all ranks' buffers.
    pub fn reduce<T: Element>(&self, buffer: &mut [T], op: ReduceOp, root: usize) -> Result<()> {
        self.execute(Collective::Reduce {
            buffer: ElementsMut::new(buffer),
            op,
            root,
        })
    }

    /// Gives rank r the r-th of `size` equal parts of the reduction of all inputs.
    pub fn reduce_scatter<T: Element>(&self, input: &[T], output: &mut [T], op: ReduceOp) -> Result<()> {
        let counts = Counts::Equal(output.len());
        self.execute(Collective::ReduceScatter {
            input: Elements::new(input),
            output: ElementsMut::new(output),
            op,
            counts,
        })
    }

    /// Gives rank r the `counts[r]` elements of its part of the reduction of all inputs.
    pub fn reduce_scatter_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        let counts = Counts::Each(counts);
        self.execute(Collective::ReduceScatter {
            input: Elements::new(input),
            output: ElementsMut::new(output),
            op,
            counts,
        })
    }

    /// Reduces part r of all buffers into part r of rank r's `buffer`; its other parts stay as they are.
    pub fn reduce_scatter_in_place<T: Element>(
        &self,
        buffer: &mut [T],
        counts: Counts<'_>,
        op: ReduceOp,
    ) -> Result<()> {
        self.execute(Collective::ReduceScatterInPlace {
            buffer: ElementsMut::new(buffer),
            op,
            counts,
        })
    }

    /// Gives every rank all inputs, one after another in rank order.
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let counts = Counts::Equal(input.len());
        self.execute(Collective::AllGather {
            input: Elements::new(input),
            output: ElementsMut::new(output),
            counts,
        })
    }

    /// Gives every rank all inputs, of which rank r's has `counts[r]` elements.
    pub fn all_gather_v<T: Element>(&self, input: &[T], output: &mut [T], counts: &[usize]) -> Result<()> {
        let counts = Counts::Each(counts);
        self.execute(Collective::AllGather {
            input: Elements::new(input),
            output: ElementsMut::new(output),
            counts,
        })
    }

    /// Copies part r of rank r's `buffer` into part r of every rank's `buffer`.
    pub fn all_gather_in_place<T: Element>(&self, buffer: &mut [T], counts: Counts<'_>) -> Result<()> {
        self.execute(Collective::AllGatherInPlace {
            buffer: ElementsMut::new(buffer),
            counts,
            label: None,
        })
    }

    /// Does so with equal parts; `label` is compared over the ranks, as for [`Communicator::all_gather_each`].
    ///
    /// [`Communicator::all_gather_each`]: #method.all_gather_each
    pub fn all_gather_labelled<T: Element>(&self, buffer: &mut [T], part: usize, label: u32) -> Result<()> {
        self.execute(Collective::AllGatherInPlace {
            buffer: ElementsMut::new(buffer),
            counts: Counts::Equal(part),
            label: Some(label),
        })
    }

    /// Hands all ranks' inputs to `each`, with the rank they come from, in any order; for elements that go to scattered
    /// places. Inputs that [`Communicator::allocate`] made are read where they lie.
    ///
    /// `label` is compared over the ranks, as counts are: it tells gathers of equal size apart.
    pub fn all_gather_each<T: Element>(
        &self,
        input: &[T],
        label: u32,
        mut each: impl FnMut(usize, &[T]),
    ) -> Result<()> {
        self.execute(Collective::AllGatherEach {
            input: Elements::new(input),
            counts: Counts::Equal(input.len()),
            label,
            each: Each(&mut |rank, elements| each(rank, elements.typed())),
        })
    }

    /// Replaces `buffer` on every rank by that of `root`.
    pub fn broadcast<T: Element>(&self, buffer: &mut [T], root: usize) -> Result<()> {
        self.execute(Collective::Broadcast {
            buffer: ElementsMut::new(buffer),
            root,
        })
    }

    /// Gives `root` all inputs in rank order; `output` is given there and only there.
    pub fn gather<T: Element>(&self, input: &[T], output: Option<&mut [T]>, root: usize) -> Result<()> {
        let counts = Counts::Equal(input.len());
        let output = output.map(ElementsMut::new);
        self.execute(Collective::Gather {
            input: Elements::new(input),
            output,
            counts,
            root,
        })
    }

    /// Gives `root` all inputs, of which rank r's has `counts[r]` elements.
    pub fn gather_v<T: Element>(
        &self,
        input: &[T],
        output: Option<&mut [T]>,
        counts: &[usize],
        root: usize,
    ) -> Result<()> {
        let output = output.map(ElementsMut::new);
        self.execute(Collective::Gather {
            input: Elements::new(input),
            output,
            counts: Counts::Each(counts),
            root,
        })
    }

    /// Gives rank r the r-th of `size` equal parts of `root`'s `input`, which is given there and only there.
    pub fn scatter<T: Element>(&self, input: Option<&[T]>, output: &mut [T], root: usize) -> Result<()> {
        let counts = Counts::Equal(output.len());
        let input = input.map(Elements::new);
        self.execute(Collective::Scatter {
            input,
            output: ElementsMut::new(output),
            counts,
            root,
        })
    }

    /// Gives rank r its `counts[r]` elements of `root`'s `input`.
    pub fn scatter_v<T: Element>(
        &self,
        input: Option<&[T]>,
        output: &mut [T],
        counts: &[usize],
        root: usize,
    ) -> Result<()> {
        let input = input.map(Elements::new);
        self.execute(Collective::Scatter {
            input,
            output: ElementsMut::new(output),
            counts: Counts::Each(counts),
            root,
        })
    }

    /// Exchanges equal parts: part s of rank r's input becomes part r of rank s's output.
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let counts = Counts::Equal(input.len() / self.size());
        self.execute(Collective::AllToAll {
            input: Elements::new(input),
            output: ElementsMut::new(output),
            send: counts,
            receive: counts,
        })
    }

    /// Exchanges unequal parts: `send[s]` elements go to rank s, `receive[s]` come from it.
    pub fn all_to_all_v<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        send: &[usize],
        receive: &[usize],
    ) -> Result<()> {
        self.execute(Collective::AllToAll {
            input: Elements::new(input),
            output: ElementsMut::new(output),
            send: Counts::Each(send),
            receive: Counts::Each(receive),
        })
    }

    /// Sends `values` to rank `to`, which must call `recv` with the same type and length.
    pub fn send<T: Element>(&self, values: &[T], to: usize) -> Result<()> {
        self.execute(Collective::SendReceive {
            send: Some((Elements::new(values), to)),
            receive: None,
        })
    }

    /// Receives `values` from rank `from`, which must call `send` with the same type and length.
    pub fn recv<T: Element>(&self, values: &mut [T], from: usize) -> Result<()> {
        self.execute(Collective::SendReceive {
            send: None,
            receive: Some((ElementsMut::new(values), from)),
        })
    }

    /// Sends to one rank while receiving from another (or the same), whatever the sizes.
    pub fn send_receive<T: Element>(&self, send: &[T], to: usize, receive: &mut [T], from: usize) -> Result<()> {
        self.execute(Collective::SendReceive {
            send: Some((Elements::new(send), to)),
            receive: Some((ElementsMut::new(receive), from)),
        })
    }

    /// Returns when all ranks have called it.
    pub fn barrier(&self) -> Result<()> {
        self.execute(Collective::Barrier)
    }

    /// Allocates `count` zeroed elements where peers can reach them in place; called by all ranks alike.
    pub fn allocate_elements<T: Element>(&self, count: usize) -> Result<Buffer> {
        self.allocate(count * T::TYPE.size())
    }

    /// Runs any operation behind the caller's other work: takes the buffer, gives it back through the handle.
    ///
    /// ```
    /// # use sconce_collectives::{ReduceOp, single};
    /// # let communicator = single();
    /// let pending = communicator.run_behind(vec![1f32; 4], |values, group| group.all_reduce(values, ReduceOp::Sum));
    /// // ... other work ...
    /// let values = pending.wait()?;
    /// # assert_eq!(values, [1.0; 4]);
    /// # Ok::<(), sconce_collectives::Error>(())
    /// ```
    pub fn run_behind<B: Send + 'static>(
        &self,
        mut buffer: B,
        operation: impl FnOnce(&mut B, &dyn Communicator) -> Result<()> + Send + 'static,
    ) -> Pending<B> {
        let (pending, completion) = Pending::new();
        self.start(Box::new(move |group| {
            completion.complete(operation(&mut buffer, group).map(|()| buffer));
        }));
        pending
    }
}
