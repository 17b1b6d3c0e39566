//! A group of ranks: entering an operation together, staging its data, and failing together.

use super::board::Board;
use super::owner::{Carrier, Owner, Watch};
use super::plan::Plan;
use crate::collective::{Collective, Counts, Kind, Signature};
use crate::flight_recorder::FlightRecorder;
use crate::parts::{Part, parts};
use crate::private::Private;
use crate::sub_groups::sub_groups;
use crate::traffic::{Traffic, TrafficCounters};
use crate::{Elements, Error, Options, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How often a rank that waits for data looks whether another has failed.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Least time that the making of a communicator has: it opens GPUs and connections, whatever the ranks do.
pub(super) const LEAST_FOR_MAKING: Duration = Duration::from_secs(60);

/// One rank's view of a group.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) board: Arc<Board>,
    pub(super) options: Options,
    takes_in_place: TakesInPlace,
    engine: Mutex<Engine>,
}

/// Says whether the carrier can work where memory of a caller's lies.
pub(super) type TakesInPlace = fn(&[u8]) -> bool;

/// What changes from operation to operation.
#[derive(Debug)]
struct Engine {
    owner: Owner,
    splits: u32,
    recorder: FlightRecorder,
    traffic: TrafficCounters,
}

impl Group {
    /// Makes a group; `make` makes the communicator in its thread, and is given what to call while it waits.
    pub(super) fn new(
        board: Board,
        options: Options,
        takes_in_place: TakesInPlace,
        make: impl FnOnce(Watch<'_>) -> Result<Box<dyn Carrier>> + Send + 'static,
    ) -> Result<Self> {
        let board = Arc::new(board);
        let watched = Arc::clone(&board);
        let owner = Owner::start(board.rank, move || {
            make(&mut watch(&watched, "making the communicator".into(), LEAST_FOR_MAKING))
        });
        let owner = owner.inspect_err(|error| board.fail(board.rank, &error.to_string()))?;
        let engine = Engine {
            owner,
            splits: 0,
            recorder: FlightRecorder::new(),
            traffic: TrafficCounters::default(),
        };
        Ok(Self {
            board,
            options,
            takes_in_place,
            engine: Mutex::new(engine),
        })
    }

    /// Runs one collective from its checks to its end.
    pub(super) fn run(&self, collective: Collective<'_>) -> Result<()> {
        let (rank, size) = (self.board.rank, self.board.size);
        collective.check(rank, size)?;
        let signature = collective.signature(size);
        self.pass(signature, |engine| self.dispatch(engine, signature, collective))
    }

    /// Enters an operation that moves no data.
    pub(super) fn meet(&self, signature: Signature) -> Result<()> {
        self.pass(signature, |_| self.board.enter(signature, &[]).map(drop))
    }

    /// Agrees on the sub-groups and returns this rank's own; `None` to a rank without a color, and to one that is alone,
    /// with `true` to the latter.
    pub(super) fn split(&self, color: Option<u32>, key: i64) -> Result<(Option<Self>, bool)> {
        let signature = Signature::of_kind(Kind::Split, 0);
        self.pass(signature, |engine| {
            let wish = [color.map_or(-1, i64::from), key];
            let told = self.board.enter(signature, bytemuck::cast_slice(&wish))?;
            let wishes: Option<Vec<[i64; 2]>> = told
                .iter()
                .map(|bytes| Some([integer(bytes, 0)?, integer(bytes, 1)?]))
                .collect();
            let wishes = wishes.ok_or_else(|| self.nonsense())?;
            engine.splits += 1;
            let mut groups = sub_groups(&wishes).into_iter().enumerate();
            let own = groups.find_map(|(number, (color, members))| {
                let place = members.iter().position(|member| *member == self.board.rank)?;
                Some((number as u32, color, (place, members.len())))
            });
            let is_alone = own.is_some_and(|(_, _, (_, size))| size == 1);
            let own = own.filter(|_| !is_alone);
            let (number, place) = own.map_or((None, (0, 0)), |(number, _, place)| (Some(number), place));
            let board = Arc::clone(&self.board);
            let carrier = engine.owner.run(move |carrier| {
                carrier.split(
                    number,
                    place,
                    &mut watch(&board, "making sub-groups".into(), LEAST_FOR_MAKING),
                )
            })?;
            let Some(((_, color, place), carrier)) = own.zip(carrier) else {
                return Ok((None, is_alone));
            };
            let board = self.board.of_sub_group(engine.splits, color, place);
            let group = Self::new(board, self.options.clone(), self.takes_in_place, move |_| Ok(carrier))?;
            Ok((Some(group), false))
        })
    }

    /// Runs `work` as one recorded operation; a failure becomes the failure of the whole group.
    fn pass<R>(&self, signature: Signature, work: impl FnOnce(&mut Engine) -> Result<R>) -> Result<R> {
        let mut engine = self.lock();
        self.board.check()?;
        engine.recorder.begin(self.board.next(), signature);
        let result = work(&mut engine);
        match &result {
            Ok(_) => {
                engine.recorder.end();
                engine.traffic.count(&signature);
            }
            Err(error) => {
                let (rank, message) = (self.board.rank, error.to_string());
                match error {
                    Error::Aborted { by, reason } => self.board.fail(*by, reason),
                    _ => self.board.fail(rank, &message),
                }
                engine.recorder.tell(&self.options, &self.board.name, rank, &message);
            }
        }
        result
    }

    fn dispatch(&self, engine: &mut Engine, signature: Signature, mut collective: Collective<'_>) -> Result<()> {
        let (rank, size) = (self.board.rank, self.board.size);
        if let Some((plan, input, output)) = self.in_place(&mut collective) {
            self.board.enter(signature, &[])?;
            let board = Arc::clone(&self.board);
            // The memory stays lent until the carrier has ended: this waits for it.
            return engine.owner.run(move |carrier| {
                let watch = &mut watch(&board, signature.to_string(), Duration::ZERO);
                carrier.carry_in_place(&plan, input, output, watch)
            });
        }
        let staged = |engine: &Engine, plan: Plan, input: &[u8], output: &mut [u8]| {
            self.board.enter(signature, &[])?;
            self.carry(engine, signature, plan, input, output)
        };
        match collective {
            Collective::Barrier => self.board.enter(signature, &[]).map(drop),
            Collective::AllReduce { mut buffer, op } => {
                let (element, input) = (buffer.element(), buffer.bytes().to_vec());
                staged(engine, Plan::AllReduce { element, op }, &input, buffer.bytes_mut())
            }
            Collective::Reduce { mut buffer, op, root } => {
                let (element, input) = (buffer.element(), buffer.bytes().to_vec());
                let output = if rank == root { buffer.bytes_mut() } else { &mut [] };
                staged(engine, Plan::Reduce { element, op, root }, &input, output)
            }
            Collective::ReduceScatter {
                input,
                mut output,
                op,
                counts,
            } => {
                let (element, parts) = (input.element(), parts(counts, input.element(), size));
                let plan = Plan::ReduceScatter { element, op, parts };
                staged(engine, plan, input.bytes(), output.bytes_mut())
            }
            Collective::ReduceScatterInPlace { mut buffer, op, counts } => {
                let (element, parts) = (buffer.element(), parts(counts, buffer.element(), size));
                let (input, own) = (buffer.bytes().to_vec(), parts[rank].clone());
                let plan = Plan::ReduceScatter { element, op, parts };
                staged(engine, plan, &input, &mut buffer.bytes_mut()[own])
            }
            Collective::AllGather {
                input,
                mut output,
                counts,
            } => {
                let parts = parts(counts, input.element(), size);
                staged(engine, Plan::AllGather { parts }, input.bytes(), output.bytes_mut())
            }
            Collective::AllGatherInPlace { mut buffer, counts, .. } => {
                let parts = parts(counts, buffer.element(), size);
                let input = buffer.bytes()[parts[rank].clone()].to_vec();
                staged(engine, Plan::AllGather { parts }, &input, buffer.bytes_mut())
            }
            Collective::AllGatherEach {
                input, counts, each, ..
            } => {
                let (element, parts) = (input.element(), parts(counts, input.element(), size));
                // Aligned as any element must be.
                let mut whole = crate::Buffer::on_heap(parts.last().map_or(0, |part| part.end));
                let bytes = whole.as_mut_slice::<u8>();
                let plan = Plan::AllGather { parts: parts.clone() };
                staged(engine, plan, input.bytes(), bytes)?;
                for (rank, part) in parts.into_iter().enumerate() {
                    each.0(rank, Elements::of_bytes(element, &bytes[part]));
                }
                Ok(())
            }
            Collective::Broadcast { mut buffer, root } => {
                let input = buffer.bytes().to_vec();
                staged(engine, Plan::Broadcast { root }, &input, buffer.bytes_mut())
            }
            Collective::Gather {
                input,
                output,
                counts,
                root,
            } => {
                let parts = parts(counts, input.element(), size);
                let send = only(root, size, 0..input.bytes().len());
                let mut output = output;
                let output = output.as_mut().map_or(&mut [][..], |output| output.bytes_mut());
                let receive = if rank == root { parts } else { vec![0..0; size] };
                staged(engine, Plan::Exchange { send, receive }, input.bytes(), output)
            }
            Collective::Scatter {
                input,
                mut output,
                counts,
                root,
            } => {
                let parts = parts(counts, output.element(), size);
                let input = input.as_ref().map_or(&[][..], Elements::bytes);
                let send = if rank == root { parts } else { vec![0..0; size] };
                let receive = only(root, size, 0..output.bytes().len());
                staged(engine, Plan::Exchange { send, receive }, input, output.bytes_mut())
            }
            Collective::AllToAll {
                input,
                mut output,
                send,
                receive,
            } => {
                let is_equal = matches!(send, Counts::Equal(_));
                let of = |counts| parts(counts, input.element(), size);
                let (send, receive) = (of(send), of(receive));
                if is_equal {
                    let plan = Plan::Exchange { send, receive };
                    return staged(engine, plan, input.bytes(), output.bytes_mut());
                }
                self.compare_lengths(signature, &send, &receive)?;
                let plan = Plan::Exchange { send, receive };
                self.carry(engine, signature, plan, input.bytes(), output.bytes_mut())
            }
            Collective::SendReceive { send, receive } => {
                let of = |element, count: usize, kind| Signature {
                    element: Some(element),
                    ..Signature::of_kind(kind, count as u64)
                };
                let sends = send
                    .as_ref()
                    .map(|(send, to)| (of(send.element(), send.len(), Kind::Send), *to));
                let receives = receive
                    .as_ref()
                    .map(|(receive, from)| (of(receive.element(), receive.len(), Kind::Receive), *from));
                self.board.agree_on_messages(sends, receives)?;
                let (to, input) = send.map_or((rank, &[][..]), |(send, to)| (to, send.bytes()));
                let (from, mut output) = match receive {
                    Some((receive, from)) => (from, Some(receive)),
                    None => (rank, None),
                };
                let output = output.as_mut().map_or(&mut [][..], |output| output.bytes_mut());
                let (send, receive) = (only(to, size, 0..input.len()), only(from, size, 0..output.len()));
                self.carry(engine, signature, Plan::Exchange { send, receive }, input, output)
            }
        }
    }

    /// Returns what is to be done, and with which memory, if that can be done where the memory lies.
    fn in_place(&self, collective: &mut Collective<'_>) -> Option<(Plan, Private, Private)> {
        let (rank, size) = (self.board.rank, self.board.size);
        let is_taken = |bytes: &[u8]| !bytes.is_empty() && (self.takes_in_place)(bytes);
        let taken = |bytes: &[u8]| is_taken(bytes).then(|| Private::of(bytes));
        let taken_mut = |bytes: &mut [u8]| is_taken(bytes).then(|| Private::of_mut(bytes));
        match collective {
            Collective::AllReduce { buffer, op } => {
                let (element, op) = (buffer.element(), *op);
                let all = taken_mut(buffer.bytes_mut())?;
                Some((Plan::AllReduce { element, op }, all, all))
            }
            Collective::Reduce { buffer, op, root } => {
                let (element, op, root) = (buffer.element(), *op, *root);
                let all = taken_mut(buffer.bytes_mut())?;
                let output = if rank == root { all } else { all.part(0..0) };
                Some((Plan::Reduce { element, op, root }, all, output))
            }
            Collective::ReduceScatter {
                input,
                output,
                op,
                counts,
            } => {
                let (element, op) = (input.element(), *op);
                let parts = parts(*counts, element, size);
                let (input, output) = (taken(input.bytes())?, taken_mut(output.bytes_mut())?);
                Some((Plan::ReduceScatter { element, op, parts }, input, output))
            }
            Collective::ReduceScatterInPlace { buffer, op, counts } => {
                let (element, op) = (buffer.element(), *op);
                let parts = parts(*counts, element, size);
                let all = taken_mut(buffer.bytes_mut())?;
                let own = all.part(parts[rank].clone());
                Some((Plan::ReduceScatter { element, op, parts }, all, own))
            }
            Collective::AllGather { input, output, counts } => {
                let parts = parts(*counts, input.element(), size);
                let (input, output) = (taken(input.bytes())?, taken_mut(output.bytes_mut())?);
                Some((Plan::AllGather { parts }, input, output))
            }
            Collective::AllGatherInPlace { buffer, counts, .. } => {
                let parts = parts(*counts, buffer.element(), size);
                let all = taken_mut(buffer.bytes_mut())?;
                let own = all.part(parts[rank].clone());
                Some((Plan::AllGather { parts }, own, all))
            }
            Collective::Broadcast { buffer, root } => {
                let all = taken_mut(buffer.bytes_mut())?;
                Some((Plan::Broadcast { root: *root }, all, all))
            }
            _ => None,
        }
    }

    /// Carries a plan out that all ranks agree on. The caller's memory is not lent to anybody: NCCL may hold what it was
    /// given for longer than an operation that fails.
    fn carry(&self, engine: &Engine, signature: Signature, plan: Plan, input: &[u8], output: &mut [u8]) -> Result<()> {
        let rank = self.board.rank;
        if let Plan::Exchange { send, receive } = &plan {
            output[receive[rank].clone()].copy_from_slice(&input[send[rank].clone()]);
        }
        if input.is_empty() && output.is_empty() {
            return Ok(());
        }
        let own = match &plan {
            Plan::Exchange { receive, .. } => receive[rank].clone(),
            _ => 0..0,
        };
        let (board, input, length) = (Arc::clone(&self.board), input.to_vec(), output.len());
        let came = engine.owner.run(move |carrier| {
            let mut came = vec![0; length];
            carrier.carry(
                &plan,
                &input,
                &mut came,
                &mut watch(&board, signature.to_string(), Duration::ZERO),
            )?;
            Ok(came)
        })?;
        let (before, after) = (0..own.start, own.end..length);
        for part in [before, after] {
            output[part.clone()].copy_from_slice(&came[part]);
        }
        Ok(())
    }

    /// Enters an exchange of unequal parts; finds ranks that send other lengths than are expected, the same on all ranks.
    fn compare_lengths(&self, signature: Signature, send: &[Part], receive: &[Part]) -> Result<()> {
        let size = self.board.size;
        let own: Vec<i64> = send.iter().chain(receive).map(|part| part.len() as i64).collect();
        let told = self.board.enter(signature, bytemuck::cast_slice(&own))?;
        for (to, from) in (0..size).flat_map(|to| (0..size).map(move |from| (to, from))) {
            let lengths = integer(&told[from], to).zip(integer(&told[to], size + from));
            let (sends, expects) = lengths.ok_or_else(|| self.nonsense())?;
            if sends != expects {
                let calls = [
                    (from, format!("sends {sends} bytes to {to}")),
                    (to, format!("expects {expects} from {from}")),
                ];
                return Err(self.board.mismatch(self.board.next() - 1, calls.into_iter()));
            }
        }
        Ok(())
    }

    fn nonsense(&self) -> Error {
        Error::Nccl {
            rank: self.board.rank,
            call: "comparing calls",
            reason: "a rank told something that does not fit its call; run the same program on all ranks".into(),
        }
    }

    /// Returns what has been moved so far.
    pub(super) fn traffic(&self) -> Vec<Traffic> {
        self.lock().traffic.read()
    }

    fn lock(&self) -> MutexGuard<'_, Engine> {
        // A panic inside an operation is told by the owner's thread; the engine is not used afterwards.
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns what is called while an operation waits: it fails when the group's time, or `least` if that is more, is over or
/// another rank has failed.
fn watch(board: &Board, operation: String, least: Duration) -> impl FnMut() -> Result<()> {
    let (start, mut looked) = (Instant::now(), Instant::now());
    let time = board.timeout.max(least);
    move || {
        if start.elapsed() > time {
            return Err(Error::Nccl {
                rank: board.rank,
                call: "waiting for NCCL",
                reason: format!(
                    "{operation} of {} has not ended within {:.1} s, though all ranks have called it: a GPU or a link is \
                     stuck (NCCL_DEBUG=INFO says which are used)",
                    board.name,
                    time.as_secs_f64()
                ),
            });
        }
        board.check()?;
        if looked.elapsed() > LOOK_EVERY {
            board.look_around()?;
            looked = Instant::now();
        }
        Ok(())
    }
}

/// Returns parts of which only that of `rank` is not empty.
fn only(rank: usize, size: usize, part: Part) -> Vec<Part> {
    let mut parts = vec![0..0; size];
    parts[rank] = part;
    parts
}

fn integer(bytes: &[u8], index: usize) -> Option<i64> {
    let bytes = bytes.get(index * 8..(index + 1) * 8)?;
    Some(i64::from_ne_bytes(bytes.try_into().ok()?))
}
