//! Loaders that serve one rank.

use super::dispatch::{Dispatch, Wire, encode};
use super::position::{LoaderPosition, Progress};
use super::prefetch::Reader;
use super::reading::{MadeBatch, Reading, Sampling};
use super::{DataLoader, LoaderState, Source};
use crate::accumulation::{Accumulation, OuterLoop};
use crate::{Error, Result};
use candle_core::Device;
use sconce_collectives::{Communicator, World};
use std::cell::OnceCell;
use std::sync::{Arc, MutexGuard};

/// A loader that gives one rank its batches.
///
/// `for batch in &mut loader` (or `&loader`) runs one epoch; every such loop is the next epoch, also after one that was
/// left early. In a loop over `&loader` the loader can be asked for its [`state`](PreparedLoader::state).
pub struct PreparedLoader<D: Source> {
    source: Arc<D>,
    settings: Settings<D>,
    position: Arc<LoaderPosition>,
}

/// What does not change while a loader is in use.
struct Settings<D: Source> {
    reading: Reading,
    prefetch: usize,
    /// How batches travel, where rank 0 makes them for all.
    dispatch: Option<Wire<D::Batch>>,
    communicator: Arc<dyn Communicator>,
    accumulation: Arc<Accumulation>,
}

impl<D: Source> PreparedLoader<D> {
    pub(crate) fn new(
        loader: DataLoader<D>,
        world: &World,
        communicator: &Arc<dyn Communicator>,
        device: &Device,
        seed: u64,
        accumulation: Arc<Accumulation>,
    ) -> Result<Self> {
        let deal = loader.deal(world)?;
        let DataLoader {
            source,
            sampling,
            prefetch,
            dispatch,
            ..
        } = loader;
        let dispatch = dispatch.filter(|_| world.size > 1);
        let reading = Reading {
            sampling,
            seed,
            epoch: 0,
            deal,
            ranks: world.rank..world.rank + 1,
            skip: 0,
            device: device.clone(),
        };
        if let Some(items) = source.items(&reading) {
            let batches = deal.batches(items, 0);
            let what = match reading.sampling {
                Sampling::Batches(_) => "batches",
                _ => "samples",
            };
            let reason = match (items, batches) {
                (0, _) => Some(format!("0 {what}; expected at least one")),
                (_, 0) => Some(format!(
                    "{items} {what} do not fill one batch of {} on each of {} ranks, and drop_last is set",
                    deal.per_rank, deal.world
                )),
                _ => None,
            };
            if let Some(reason) = reason {
                return Err(Error::Loader { reason });
            }
        }
        let position = LoaderPosition::new(seed, deal.together());
        Ok(Self {
            source: Arc::new(source),
            settings: Settings {
                reading,
                prefetch,
                dispatch,
                communicator: Arc::clone(communicator),
                accumulation,
            },
            position: Arc::new(position),
        })
    }

    /// Returns the number of batches of the next epoch on this rank, those that are skipped too, where it is known before;
    /// [`Source`]s that are data sets always know it.
    pub fn batches(&self) -> Option<usize> {
        let progress = *self.progress();
        self.batches_in(progress.seed, progress.epoch)
    }

    /// Returns the number of the next epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.progress().epoch
    }

    /// Sets the number of the next epoch.
    pub fn set_epoch(&mut self, epoch: u64) {
        let mut progress = self.progress();
        progress.epoch = epoch;
        progress.open = None;
    }

    /// Lets the next epoch, and only that, begin behind its first `batches` batches.
    pub fn skip_first_batches(&mut self, batches: usize) {
        let mut progress = self.progress();
        progress.skip = batches;
        progress.open = None;
    }

    /// Returns where this loader stands: within its loop the batches given so far, with that of this round of the loop;
    /// behind a loop the beginning of the next epoch, or, if it was left early, the place where it was left.
    pub fn state(&self) -> LoaderState {
        self.position.state()
    }

    /// Goes on where a state was taken: the next loop gives the batches of that epoch that were not given yet, the loops
    /// after it the next epochs.
    ///
    /// # Errors
    /// [`Error::Loader`] when steps had another number of samples (of batches, with a batch sampler), and those seen are no
    /// whole number of this loader's steps.
    pub fn restore(&mut self, state: LoaderState) -> Result<()> {
        self.position.restore(state)
    }

    /// Returns where it stands, for checkpoints.
    pub(crate) fn position(&self) -> Arc<LoaderPosition> {
        Arc::clone(&self.position)
    }

    /// Describes what all ranks must have alike.
    pub(crate) fn described(&self) -> String {
        let Reading { deal, seed, .. } = &self.settings.reading;
        let items = match &self.settings.dispatch {
            // Rank 0 reads for all.
            Some(_) => None,
            None => self.source.items(&self.settings.reading),
        };
        let items = items.map_or_else(String::new, |items| format!("{items} samples, "));
        format!("{items}{} a rank and step, seed {seed}", deal.per_rank)
    }

    /// Returns what is read: the data set, or the stream.
    pub fn dataset(&self) -> &D {
        &self.source
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.position.progress()
    }

    fn reading(&self, seed: u64, epoch: u64, skip: usize) -> Reading {
        Reading {
            seed,
            epoch,
            skip,
            ..self.settings.reading.clone()
        }
    }

    fn batches_in(&self, seed: u64, epoch: u64) -> Option<usize> {
        let reading = self.reading(seed, epoch, 0);
        let items = self.source.items(&reading)?;
        Some(reading.deal.batches(items, reading.ranks.start))
    }

    fn batches_of(&self, reading: Reading) -> Batches<D::Batch> {
        let prefetch = self.settings.prefetch;
        let Some(wire) = self.settings.dispatch else {
            return Batches::Own(Reader::new(|| D::rounds(&self.source, reading.clone()), prefetch));
        };
        let communicator = &self.settings.communicator;
        let device = reading.device.clone();
        let reading = Reading {
            ranks: 0..communicator.size(),
            device: Device::Cpu,
            ..reading
        };
        let rounds = || encode(D::rounds(&self.source, reading.clone()), wire);
        let reader = (communicator.rank() == 0).then(|| Reader::new(rounds, prefetch));
        Batches::Dispatched(Dispatch::new(Arc::clone(communicator), reader, wire, device))
    }
}

impl<D: super::Dataset> PreparedLoader<D> {
    /// Returns the number of batches of the next epoch on this rank.
    pub fn len(&self) -> usize {
        self.batches().unwrap_or(0)
    }

    /// Says whether this rank gets no batches.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<D: Source> std::fmt::Debug for PreparedLoader<D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("PreparedLoader")
            .field("reading", &self.settings.reading)
            .field("progress", &*self.progress())
            .finish_non_exhaustive()
    }
}

impl<'l, D: Source> IntoIterator for &'l mut PreparedLoader<D> {
    type Item = Result<D::Batch>;
    type IntoIter = LoaderIterator<'l, D>;

    fn into_iter(self) -> LoaderIterator<'l, D> {
        (&*self).into_iter()
    }
}

impl<'l, D: Source> IntoIterator for &'l PreparedLoader<D> {
    type Item = Result<D::Batch>;
    type IntoIter = LoaderIterator<'l, D>;

    fn into_iter(self) -> LoaderIterator<'l, D> {
        let (epoch, skip, seed) = {
            let mut progress = self.progress();
            let epoch = progress.epoch;
            progress.epoch += 1;
            let skip = std::mem::take(&mut progress.skip);
            progress.open = Some((epoch, skip));
            (epoch, skip, progress.seed)
        };
        LoaderIterator {
            batches: self.batches_of(self.reading(seed, epoch, skip)),
            loader: self,
            epoch,
            seed,
            given: skip,
            expected: OnceCell::new(),
            ended: false,
            outer: self.settings.accumulation.enter_loader(),
        }
    }
}

/// Where a rank's batches come from.
#[derive(Debug)]
enum Batches<B> {
    /// It makes them.
    Own(Reader<Vec<MadeBatch<B>>>),
    /// Rank 0 makes them.
    Dispatched(Dispatch<B>),
}

impl<B: Send + 'static> Batches<B> {
    fn next(&mut self) -> Result<Option<MadeBatch<B>>> {
        match self {
            Self::Dispatched(dispatch) => dispatch.next(),
            Self::Own(reader) => match reader.next().transpose() {
                Ok(round) => Ok(round.and_then(|mut round| round.pop())),
                Err(panic) => std::panic::resume_unwind(panic),
            },
        }
    }
}

/// One epoch of a loader.
pub struct LoaderIterator<'l, D: Source> {
    loader: &'l PreparedLoader<D>,
    batches: Batches<D::Batch>,
    epoch: u64,
    seed: u64,
    /// Batches given, and those skipped.
    given: usize,
    /// Batches of the epoch, where known before; asked of the source once somebody wants to know, as a batch sampler has to
    /// make them all to tell.
    expected: OnceCell<Option<usize>>,
    ended: bool,
    outer: OuterLoop,
}

impl<D: Source> Iterator for LoaderIterator<'_, D> {
    type Item = Result<D::Batch>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            self.loader.progress().open = None;
            self.loader.settings.accumulation.end_batches();
            return None;
        }
        // Also behind a failure of the group, and a panic of the data set.
        self.ended = true;
        let span = tracing::debug_span!("wait for batch", what = self.given).entered();
        let made = self.batches.next();
        drop(span);
        let made = match made {
            Ok(Some(made)) => made,
            Ok(None) => return self.next(),
            Err(error) => return Some(Err(error)),
        };
        let number = self.given;
        self.given += 1;
        self.ended = made.facts.last;
        self.loader.progress().open = Some((self.epoch, self.given));
        self.loader.settings.accumulation.begin_batch(made.facts);
        Some(made.batch.map_err(|source| Error::Dataset {
            batch: number,
            epoch: self.epoch,
            source,
        }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        if self.ended {
            return (0, Some(0));
        }
        let expected = self
            .expected
            .get_or_init(|| self.loader.batches_in(self.seed, self.epoch));
        let left = expected.map(|expected| expected.saturating_sub(self.given));
        (left.unwrap_or(0), left)
    }
}

impl<D: super::Dataset> ExactSizeIterator for LoaderIterator<'_, D> {}

impl<D: Source> Drop for LoaderIterator<'_, D> {
    fn drop(&mut self) {
        self.loader.settings.accumulation.leave_loader(self.outer);
    }
}

impl<D: Source> std::fmt::Debug for LoaderIterator<'_, D> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("LoaderIterator")
            .field("epoch", &self.epoch)
            .field("given", &self.given)
            .field("ended", &self.ended)
            .finish_non_exhaustive()
    }
}
