//! A communicator that records what passes through it and can disturb it: it sleeps at random, or holds operations back.
//!
//! It also takes what a model says of its computing, so that one record shows in which order a rank computes, queues
//! operations and runs them.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use sconce_collectives::{Buffer, Collective, Communicator, Job, Kind, Result, Traffic};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The longest that an operation is held back; then the test fails.
const PATIENCE: Duration = Duration::from_secs(30);
/// The longest sleep around an operation, in microseconds.
const LONGEST_SLEEP: u64 = 300;

/// An operation as its caller gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Operation {
    pub(crate) kind: Kind,
    /// What tells gathers of equal size apart.
    pub(crate) label: Option<u32>,
    /// Bytes of the whole, all ranks' parts together.
    pub(crate) bytes: u64,
}

/// What happens on a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// A job is queued to run behind other work; jobs are numbered from 0.
    Queued(usize),
    /// An operation begins: that of a job, or one that its caller waits for.
    Entered(Option<usize>, Operation),
    /// It has ended.
    Ended(Option<usize>, Operation),
    /// A unit has computed its result.
    Forward(usize),
    /// A unit begins to compute its gradients.
    BackwardBegins(usize),
    /// It has computed that of its input.
    BackwardEnds(usize),
}

/// Says of an operation that is about to begin whether it must wait, in view of all that has happened.
type Hold = Box<dyn Fn(&Operation, &[Event]) -> bool + Send>;

/// A communicator that passes everything on to another.
#[derive(Debug)]
pub(crate) struct Watched {
    group: Arc<dyn Communicator>,
    record: Arc<Record>,
}

/// The same group as jobs see it.
#[derive(Debug)]
struct WatchedJob<'a> {
    group: &'a dyn Communicator,
    record: &'a Record,
    job: usize,
}

#[derive(Default)]
struct Record {
    state: Mutex<State>,
    grown: Condvar,
}

#[derive(Default)]
struct State {
    events: Vec<Event>,
    jobs: usize,
    sleeps: Option<ChaCha8Rng>,
    hold: Option<Hold>,
}

impl std::fmt::Debug for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Record")
    }
}

impl Watched {
    /// Watches a group.
    pub(crate) fn new(group: Arc<dyn Communicator>) -> Arc<Self> {
        Arc::new(Self {
            group,
            record: Arc::default(),
        })
    }

    /// Returns what the engine is made with.
    pub(crate) fn communicator(self: &Arc<Self>) -> Arc<dyn Communicator> {
        Arc::clone(self) as Arc<dyn Communicator>
    }

    /// Sleeps before and after every operation from now on, and when one is queued; each rank otherwise.
    pub(crate) fn sleep_at_random(&self, seed: u64) {
        let seed = seed * 1000 + self.group.rank() as u64;
        self.record.lock().sleeps = Some(ChaCha8Rng::seed_from_u64(seed));
    }

    /// Holds operations back as long as `hold` says so.
    pub(crate) fn hold_back(&self, hold: impl Fn(&Operation, &[Event]) -> bool + Send + 'static) {
        self.record.lock().hold = Some(Box::new(hold));
    }

    /// Notes something.
    pub(crate) fn note(&self, event: Event) {
        self.record.note(event);
    }

    /// Returns what has happened since the last call, all operations that were started behind included.
    pub(crate) fn take_events(&self) -> Vec<Event> {
        // A job ends after its operation: another job sees all of those before it.
        let waiting = self.group.run_behind((), |(), _| Ok(())).wait();
        waiting.expect("the group has not failed");
        let mut state = self.record.lock();
        state.jobs = 0;
        std::mem::take(&mut state.events)
    }
}

/// Returns the operations of some events, in the order in which they began.
pub(crate) fn operations(events: &[Event]) -> Vec<Operation> {
    let entered = |event: &Event| match event {
        Event::Entered(_, operation) => Some(*operation),
        _ => None,
    };
    events.iter().filter_map(entered).collect()
}

impl Record {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, event: Event) {
        self.lock().events.push(event);
        self.grown.notify_all();
    }

    fn sleep(&self) {
        let drawn = self
            .lock()
            .sleeps
            .as_mut()
            .map(|sleeps| sleeps.random_range(0..=LONGEST_SLEEP));
        drawn
            .into_iter()
            .for_each(|micros| std::thread::sleep(Duration::from_micros(micros)));
    }

    /// Returns when an operation may begin; says whether that was soon enough.
    fn may_begin(&self, operation: &Operation) -> bool {
        let is_held = |state: &mut State| state.hold.as_ref().is_some_and(|hold| hold(operation, &state.events));
        let waited = self.grown.wait_timeout_while(self.lock(), PATIENCE, is_held);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }

    fn pass_on(&self, job: Option<usize>, group: &dyn Communicator, collective: Collective<'_>) -> Result<()> {
        let signature = collective.signature(group.size());
        let operation = Operation {
            kind: signature.kind,
            label: match collective {
                Collective::AllGatherEach { label, .. } => Some(label),
                _ => None,
            },
            bytes: signature.count * signature.element.map_or(0, |element| element.size() as u64),
        };
        self.sleep();
        if !self.may_begin(&operation) {
            group.abort("what an operation was held back for did not happen");
        }
        self.note(Event::Entered(job, operation));
        let outcome = group.execute(collective);
        self.sleep();
        self.note(Event::Ended(job, operation));
        outcome
    }
}

impl Communicator for Watched {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn backend(&self) -> &'static str {
        self.group.backend()
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        self.record.pass_on(None, &*self.group, collective)
    }

    fn start(&self, job: Job) {
        let number = {
            let mut state = self.record.lock();
            state.jobs += 1;
            state.jobs - 1
        };
        self.record.note(Event::Queued(number));
        let record = Arc::clone(&self.record);
        self.group.start(Box::new(move |group| {
            job(&WatchedJob {
                group,
                record: &record,
                job: number,
            });
        }));
        // The caller may be slow where the job is fast.
        self.record.sleep();
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.group.allocate(bytes)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        let group = self.group.split(color, key)?;
        Ok(group.map(|group| {
            let record = Arc::clone(&self.record);
            Arc::new(Self { group, record }) as Arc<dyn Communicator>
        }))
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.group.traffic()
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }
}

impl Communicator for WatchedJob<'_> {
    fn rank(&self) -> usize {
        self.group.rank()
    }

    fn size(&self) -> usize {
        self.group.size()
    }

    fn backend(&self) -> &'static str {
        self.group.backend()
    }

    fn execute(&self, collective: Collective<'_>) -> Result<()> {
        self.record.pass_on(Some(self.job), self.group, collective)
    }

    fn start(&self, job: Job) {
        job(self);
    }

    fn allocate(&self, bytes: usize) -> Result<Buffer> {
        self.group.allocate(bytes)
    }

    fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Arc<dyn Communicator>>> {
        self.group.split(color, key)
    }

    fn traffic(&self) -> Vec<Traffic> {
        self.group.traffic()
    }

    fn abort(&self, reason: &str) {
        self.group.abort(reason);
    }
}
