//! Ranks among each other, outside of training: who goes first, by turns, in parts, and at whose word all act.

use crate::{Accelerator, Result, Split};
use sconce_collectives::ReduceOp;
use sconce_zero::RandomState;
use std::sync::atomic::Ordering::Relaxed;

impl<'a> dyn Accelerator + 'a {
    /// Runs `work` on rank 0 while the others wait, then on the others: so that one downloads or prepares what all use.
    ///
    /// # Errors
    /// When a rank is lost or late; what `work` returns, also an error, is a value to this.
    pub fn main_process_first<R>(&self, work: impl FnOnce() -> R) -> Result<R> {
        self.first(self.is_main_process(), work)
    }

    /// Runs `work` on the first rank of every host while the others wait, then on the others.
    ///
    /// # Errors
    /// As [`main_process_first`](trait.Accelerator.html#method.main_process_first).
    pub fn local_main_process_first<R>(&self, work: impl FnOnce() -> R) -> Result<R> {
        self.first(self.is_local_main_process(), work)
    }

    fn first<R>(&self, is_first: bool, work: impl FnOnce() -> R) -> Result<R> {
        if !is_first {
            self.wait_for_everyone()?;
        }
        let result = work();
        if is_first {
            self.wait_for_everyone()?;
        }
        self.wait_for_everyone()?;
        Ok(result)
    }

    /// Runs `work` on one rank after another, in rank order: for what ranks log or print by turns.
    ///
    /// # Errors
    /// When a rank is lost or late.
    pub fn in_order<R>(&self, work: impl FnOnce() -> R) -> Result<R> {
        let (rank, size) = (self.world().rank, self.world().size);
        (0..rank).try_for_each(|_| self.wait_for_everyone())?;
        let result = work();
        (rank..size).try_for_each(|_| self.wait_for_everyone())?;
        Ok(result)
    }

    /// Raises this rank's flag, of which all ranks learn at the next `check_trigger`: one that has seen enough can end the
    /// training of all.
    pub fn set_trigger(&self) {
        self.trigger().store(true, Relaxed);
    }

    /// Says whether any rank's flag is raised, and lowers them all.
    ///
    /// # Errors
    /// When a rank is lost or late.
    pub fn check_trigger(&self) -> Result<bool> {
        let mut raised = [u8::from(self.trigger().swap(false, Relaxed))];
        self.communicator().all_reduce(&mut raised, ReduceOp::Max)?;
        Ok(raised != [0])
    }

    /// Makes the [`RandomState`] of every rank's calling thread that of rank 0's.
    ///
    /// # Errors
    /// When a rank is lost or late.
    pub fn synchronize_random_state(&self) -> Result<()> {
        let own = RandomState::current();
        let mut words = [own.seed as i64, own.draws as i64];
        self.communicator().broadcast(&mut words, 0)?;
        let [seed, draws] = words.map(|word| word as u64);
        RandomState { seed, draws }.restore();
        Ok(())
    }

    /// Returns this rank's part of inputs that all ranks have: contiguous, of sizes that differ by one at most, the larger
    /// parts first. With more ranks than elements some parts are empty.
    ///
    /// # Errors
    /// Parts of `inputs` with different numbers of elements.
    pub fn split_between_processes<S: Split>(&self, inputs: &S) -> Result<S> {
        crate::split::split(inputs, false, self.world().rank, self.world().size)
    }

    /// Does what [`split_between_processes`](trait.Accelerator.html#method.split_between_processes) does, and repeats the
    /// last element of all inputs where a part is smaller than the largest, so that results can be gathered.
    ///
    /// # Errors
    /// As there.
    pub fn split_between_processes_padded<S: Split>(&self, inputs: &S) -> Result<S> {
        crate::split::split(inputs, true, self.world().rank, self.world().size)
    }
}
