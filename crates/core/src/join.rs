//! Loops over inputs of which some ranks have more than others.
//!
//! Every operation of training is one of all ranks, so a rank whose inputs have ended goes along: it repeats its last input,
//! whose loss counts for nothing. The others' losses count for more, so that gradients are the mean over the ranks that
//! have inputs; PyTorch's `Join` divides by the number of all ranks by default, which makes the last gradients smaller.

use crate::accumulation::Accumulation;
use crate::data::BatchFacts;
use crate::{Accelerator, Error, Result};
use sconce_collectives::{Communicator, ReduceOp};
use std::sync::Arc;

/// The inputs of a loop that ends on all ranks together, after the last input of the rank that has most.
#[derive(Debug)]
pub struct Joined<I: Iterator<Item = Result<B>>, B> {
    inputs: I,
    /// What `inputs` gave last, ahead of its turn, and what its loader knows of it.
    ahead: Option<(Result<B>, Option<BatchFacts>)>,
    /// What this rank repeats when its inputs have ended.
    last: Option<(B, Option<BatchFacts>)>,
    has_ended: bool,
    communicator: Arc<dyn Communicator>,
    accumulation: Arc<Accumulation>,
}

/// How many ranks stand how, before an input is given.
struct Counts {
    /// With an input of their own.
    with_input: u32,
    /// With another one after that.
    with_more: u32,
    failed: u32,
    /// With nothing that they could repeat.
    empty: u32,
}

impl<'a> dyn Accelerator + 'a {
    /// Loops over inputs of which ranks have different numbers, until the last rank's have ended; called by all ranks.
    ///
    /// A rank without inputs left gets its last one again: `backward` weighs the loss by 0 there, and the other ranks' losses
    /// so that the gradients are the mean over the ranks that have inputs. Works with every strategy.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::Module;
    /// # use sconce_core::{Sgd, Weights};
    /// # let acc = sconce_core::accelerator()?;
    /// # let model = candle_nn::linear(3, 1, acc.var_builder(Weights::Random { seed: 1 })?)?;
    /// # let mut optimizer = acc.prepare_optimizer(Box::new(Sgd::default()))?;
    /// // As many as this rank happens to have.
    /// let inputs = vec![Ok(Tensor::ones((2, 3), DType::F32, &Device::Cpu)?)];
    /// for input in acc.join_uneven_inputs(inputs) {
    ///     acc.backward(&model.forward(&input?)?.sqr()?.mean_all()?)?;
    ///     optimizer.step()?;
    ///     optimizer.zero_grad()?;
    /// }
    /// # Ok::<(), sconce_core::Error>(())
    /// ```
    ///
    /// An input that cannot be read ends the loop on all ranks with an error, and so does a rank that has none at all.
    pub fn join_uneven_inputs<I, B: Clone>(&self, inputs: I) -> Joined<I::IntoIter, B>
    where
        I: IntoIterator<Item = Result<B>>,
    {
        let mut joined = Joined {
            inputs: inputs.into_iter(),
            ahead: None,
            last: None,
            has_ended: false,
            communicator: Arc::clone(self.communicator()),
            accumulation: Arc::clone(self.accumulation()),
        };
        joined.look_ahead();
        joined
    }
}

impl<I: Iterator<Item = Result<B>>, B: Clone> Joined<I, B> {
    /// Returns the next input, or `None` after the last rank's last.
    fn give(&mut self) -> Result<Option<B>> {
        let own = self.ahead.take();
        if own.is_some() {
            self.look_ahead();
        }
        let (own, facts) = own.map_or((None, None), |(own, facts)| (Some(own), facts));
        let counts = self.counts(own.as_ref())?;
        if counts.failed > 0 {
            let outcome = own.transpose();
            return crate::together::together(&*self.communicator, outcome.map(|_| None));
        }
        if counts.with_input == 0 {
            return Ok(None);
        }
        if counts.empty > 0 {
            return Err(Error::Loader {
                reason: format!(
                    "{} rank(s) have no input at all, so that they cannot go along with the others; every rank needs at \
                     least one",
                    counts.empty
                ),
            });
        }
        let weight = match own {
            Some(_) => self.communicator.size() as f64 / f64::from(counts.with_input),
            None => 0.0,
        };
        match own.transpose()? {
            Some(input) => self.last = Some((input, facts)),
            // Its results have been counted.
            None => self
                .last
                .iter_mut()
                .flat_map(|(_, facts)| facts)
                .for_each(|facts| facts.fresh = 0),
        }
        let (input, facts) = self.last.clone().unzip();
        let last = counts.with_more == 0;
        let facts = facts.flatten().map(|facts| BatchFacts {
            last,
            complete: true,
            ..facts
        });
        self.accumulation.weigh(weight);
        self.accumulation.begin_input(facts, last);
        Ok(input)
    }

    fn look_ahead(&mut self) {
        // A loader says what it knows of a batch when it gives it.
        self.accumulation.end_batches();
        self.ahead = self
            .inputs
            .next()
            .map(|input| (input, self.accumulation.current_batch()));
    }

    fn counts(&self, own: Option<&Result<B>>) -> Result<Counts> {
        let has_more = self.ahead.is_some();
        let has_failed = own.is_some_and(Result::is_err);
        let is_empty = own.is_none() && self.last.is_none();
        let mut sums = [own.is_some(), has_more, has_failed, is_empty].map(u32::from);
        self.communicator.all_reduce(&mut sums, ReduceOp::Sum)?;
        let [with_input, with_more, failed, empty] = sums;
        Ok(Counts {
            with_input,
            with_more,
            failed,
            empty,
        })
    }
}

impl<I: Iterator<Item = Result<B>>, B: Clone> Iterator for Joined<I, B> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Result<B>> {
        if self.has_ended {
            return None;
        }
        let given = self.give().transpose();
        self.has_ended = !matches!(given, Some(Ok(_)));
        given
    }
}

impl<I: Iterator<Item = Result<B>>, B> Drop for Joined<I, B> {
    fn drop(&mut self) {
        self.accumulation.weigh(1.0);
    }
}
