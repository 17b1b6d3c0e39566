//! The calls of NCCL's C interface, each with its result checked.
//!
//! # Safety
//! - A [`Handle`] is a communicator that was made and has not ended: it is nulled when it ends, and no call is made with a
//!   null one. One thread at a time has it, since calls take `&mut self`.
//! - Memory is given to NCCL as a plan that [`Plan::fits`] its lengths, so that no call reaches outside of it. It is
//!   [`Memory`] on the communicator's own device, owned by the same carrier, which outlives what NCCL does with it; or unified
//!   memory that the caller has lent for the operation ([`Private`]), which every device reaches. A carrier waits until the
//!   work has ended, or aborts the communicator, before it touches, frees or gives back the memory.
//! - The library is there: `cuda::require_nccl` was asked before the first call.

use super::memory::Memory;
use super::owner::Watch;
use super::plan::{Plan, are_equal};
use crate::private::Private;
use crate::{ElementType, Error, ReduceOp, Result};
use candle_core::cuda::cudarc::driver::{CudaEvent, CudaStream, DevicePtrMut};
use candle_core::cuda::cudarc::nccl::result::{self, NcclError, NcclStatus};
use candle_core::cuda::cudarc::nccl::sys;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering::Acquire};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

/// Bytes of an id.
pub(super) const ID: usize = 128;

/// How long NCCL may take to abort or to end a communicator; then the process is ended.
const LAST_MOMENT: Duration = Duration::from_secs(20);

/// How long a communicator that ends waits for what it has still to send.
const FINALISING: Duration = Duration::from_secs(5);

/// A color that NCCL knows as none.
const NO_COLOR: c_int = -1;

/// Longest pause between two looks at whether something has ended.
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// Makes the id under which the ranks of a new communicator meet.
pub(super) fn unique_id() -> Result<[u8; ID]> {
    let id = result::get_uniqueid().map_err(|error| refused(0, "ncclGetUniqueId", &error))?;
    Ok(id.internal.map(|byte| byte as u8))
}

/// Asks the library for its version, such as 22809 for 2.28.9.
pub(super) fn version() -> Result<u32> {
    let version = result::get_nccl_version().map_err(|error| refused(0, "ncclGetVersion", &error))?;
    Ok(version.unsigned_abs())
}

/// A communicator of NCCL's.
#[derive(Debug)]
pub(super) struct Handle {
    communicator: sys::ncclComm_t,
    rank: usize,
    size: usize,
}

// SAFETY: NCCL allows any thread to use a communicator, one at a time (module page).
unsafe impl Send for Handle {}

impl Handle {
    /// Meets the other ranks that have this id, on the device of the calling thread's context.
    pub(super) fn connect(id: [u8; ID], rank: usize, size: usize, watch: Watch<'_>) -> Result<Self> {
        let (slot, mut config) = (slot(), non_blocking());
        let id = sys::ncclUniqueId {
            internal: id.map(|byte| byte as c_char),
        };
        // SAFETY: a slot that stays, and a local that is read during the call, filled as NCCL's own initialiser does.
        let made =
            unsafe { result::comm_init_rank_config(slot.as_ptr(), size as c_int, id, rank as c_int, &raw mut config) };
        made.map_err(|error| refused(rank, "ncclCommInitRankConfig", &error))?;
        let mut handle = Self {
            communicator: slot.load(Acquire),
            rank,
            size,
        };
        handle.settle("ncclCommInitRankConfig", watch)?;
        Ok(handle)
    }

    /// Makes groups of the ranks with equal colors, which know their `(rank, size)`; called by all ranks.
    pub(super) fn split(
        &mut self,
        color: Option<u32>,
        (rank, size): (usize, usize),
        watch: Watch<'_>,
    ) -> Result<Option<Self>> {
        self.alive("ncclCommSplit")?;
        let (slot, mut config) = (slot(), non_blocking());
        let wanted = color.map_or(NO_COLOR, |color| color as c_int);
        // SAFETY: a communicator that is alive, a slot and a config as above; all its ranks make this call.
        let code =
            unsafe { sys::ncclCommSplit(self.communicator, wanted, rank as c_int, slot.as_ptr(), &raw mut config) };
        self.checked("ncclCommSplit", code.result())?;
        self.settle("ncclCommSplit", watch)?;
        if color.is_none() {
            return Ok(None);
        }
        let mut made = Self {
            communicator: slot.load(Acquire),
            rank,
            size,
        };
        made.settle("ncclCommSplit", watch)?;
        Ok(Some(made))
    }

    /// Puts the calls of a plan into the memory's stream; `lengths` are those of its input and output.
    pub(super) fn enqueue(
        &mut self,
        plan: &Plan,
        memory: &mut Memory,
        lengths: (usize, usize),
        watch: Watch<'_>,
    ) -> Result<()> {
        self.alive("an operation")?;
        let is_sound = plan.fits(self.rank, self.size, lengths.0, lengths.1) && memory.holds(lengths);
        if !is_sound || memory.device() != self.device()? {
            return Err(self.failed(
                "an operation",
                format!("{plan:?} does not fit {lengths:?} bytes of {memory:?}"),
            ));
        }
        let stream = memory.stream();
        let (input, _reading) = memory.input.device_ptr_mut(&stream);
        let (output, _writing) = memory.output.device_ptr_mut(&stream);
        self.put(plan, (input, output), lengths.0, &stream, watch)
    }

    /// Puts the calls of a plan on memory of the caller's into that stream.
    pub(super) fn enqueue_in_place(
        &mut self,
        plan: &Plan,
        memory: &Memory,
        (input, output): (Private, Private),
        watch: Watch<'_>,
    ) -> Result<()> {
        self.alive("an operation")?;
        let lengths = (input.len(), output.len());
        if !plan.fits(self.rank, self.size, lengths.0, lengths.1)
            || !output.is_writable()
            || memory.device() != self.device()?
        {
            return Err(self.failed(
                "an operation",
                format!("{plan:?} does not fit {lengths:?} bytes in place"),
            ));
        }
        memory.bind()?;
        let addresses = (input.pointer().addr() as u64, output.pointer().addr() as u64);
        self.put(plan, addresses, lengths.0, &memory.stream(), watch)
    }

    /// Puts the calls of a plan that fits memory into a stream; `length` is that of the input in bytes.
    fn put(
        &mut self,
        plan: &Plan,
        (input, output): (u64, u64),
        length: usize,
        stream: &CudaStream,
        watch: Watch<'_>,
    ) -> Result<()> {
        let calls = Calls {
            handle: self,
            input,
            output,
            stream: stream.cu_stream().cast(),
        };
        calls.checked("ncclGroupStart", result::group_start())?;
        let called = calls.make(plan, length);
        // Always, or every later call would belong to this group.
        let ended = calls.checked("ncclGroupEnd", result::group_end());
        called.and(ended)?;
        self.settle("ncclGroupEnd", watch)
    }

    /// Waits for what was put into the stream before `event`.
    pub(super) fn wait(&mut self, event: &CudaEvent, watch: Watch<'_>) -> Result<()> {
        let mut pause = Duration::from_micros(1);
        loop {
            self.async_state("an operation")?;
            let is_complete = event.try_is_complete();
            if is_complete.map_err(|error| self.failed("cuEventQuery", error.to_string()))? {
                return Ok(());
            }
            watch()?;
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Ends the communicator without its peers, or the process if NCCL does not return.
    pub(super) fn abort(&mut self) {
        let communicator = std::mem::replace(&mut self.communicator, std::ptr::null_mut());
        if communicator.is_null() {
            return;
        }
        or_end_the_process(self.rank, || {
            // SAFETY: a communicator that was alive until this line, and is forgotten here.
            let _ = unsafe { result::comm_abort(communicator) };
        });
    }

    /// Waits until NCCL has done what a call began: calls do not block.
    fn settle(&mut self, call: &'static str, watch: Watch<'_>) -> Result<()> {
        let mut pause = Duration::from_micros(1);
        while self.async_state(call)? == NcclStatus::InProgress {
            if let Err(error) = watch() {
                self.abort();
                return Err(error);
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        Ok(())
    }

    /// Asks for failures that showed after a call had returned.
    fn async_state(&mut self, call: &'static str) -> Result<NcclStatus> {
        self.alive(call)?;
        let mut state = sys::ncclResult_t::ncclSuccess;
        // SAFETY: a communicator that is alive, and a local.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.communicator, &raw mut state) };
        self.checked("ncclCommGetAsyncError", asked.result())?;
        self.checked(call, state.result())
    }

    fn device(&self) -> Result<usize> {
        // SAFETY: a communicator that is alive; `enqueue` has seen to it.
        let device = unsafe { result::comm_cu_device(self.communicator) };
        let device = device.map_err(|error| refused(self.rank, "ncclCommCuDevice", &error))?;
        Ok(device as usize)
    }

    fn alive(&self, call: &'static str) -> Result<()> {
        if self.communicator.is_null() {
            return Err(self.failed(call, "the communicator was aborted after a failure".into()));
        }
        Ok(())
    }

    fn checked(&self, call: &'static str, status: Result<NcclStatus, NcclError>) -> Result<NcclStatus> {
        status.map_err(|error| refused(self.rank, call, &error))
    }

    fn failed(&self, call: &'static str, reason: String) -> Error {
        Error::Nccl {
            rank: self.rank,
            call,
            reason,
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.communicator.is_null() {
            return;
        }
        // SAFETY: a communicator that is alive; nothing is put into it afterwards.
        let _ = unsafe { result::comm_finalize(self.communicator) };
        let start = Instant::now();
        loop {
            match self.async_state("ncclCommFinalize") {
                Ok(NcclStatus::InProgress) if start.elapsed() < FINALISING => std::thread::sleep(LONGEST_PAUSE),
                Ok(NcclStatus::Success) => break,
                // A peer that is gone must not hold this rank.
                _ => return self.abort(),
            }
        }
        let communicator = std::mem::replace(&mut self.communicator, std::ptr::null_mut());
        or_end_the_process(self.rank, || {
            // SAFETY: a communicator that was alive until it was finalised, and is forgotten here.
            let _ = unsafe { result::comm_destroy(communicator) };
        });
    }
}

/// The calls of one group, on memory whose addresses are known.
struct Calls<'h> {
    handle: &'h Handle,
    input: u64,
    output: u64,
    stream: sys::cudaStream_t,
}

impl Calls<'_> {
    fn make(&self, plan: &Plan, input: usize) -> Result<()> {
        let (rank, all) = (self.handle.rank, 0..self.handle.size);
        match plan {
            Plan::AllReduce { element, op } => self.all_reduce(input / element.size(), *element, *op),
            Plan::Reduce { element, op, root } => self.reduce(0, input / element.size(), *element, *op, *root),
            Plan::ReduceScatter { element, op, parts } if are_equal(parts) => {
                self.reduce_scatter(parts[rank].len() / element.size(), *element, *op)
            }
            Plan::ReduceScatter { element, op, parts } => {
                all.filter(|peer| !parts[*peer].is_empty()).try_for_each(|peer| {
                    let part = &parts[peer];
                    self.reduce(part.start, part.len() / element.size(), *element, *op, peer)
                })
            }
            Plan::AllGather { parts } if are_equal(parts) => self.all_gather(input),
            Plan::AllGather { parts } => all
                .filter(|peer| !parts[*peer].is_empty())
                .try_for_each(|peer| self.broadcast(parts[peer].start, parts[peer].len(), peer)),
            Plan::Broadcast { root } => self.broadcast(0, input, *root),
            Plan::Exchange { send, receive } => all.filter(|peer| *peer != rank).try_for_each(|peer| {
                if !send[peer].is_empty() {
                    self.send(send[peer].start, send[peer].len(), peer)?;
                }
                if !receive[peer].is_empty() {
                    self.receive(receive[peer].start, receive[peer].len(), peer)?;
                }
                Ok(())
            }),
        }
    }

    fn all_reduce(&self, count: usize, element: ElementType, op: ReduceOp) -> Result<()> {
        let (from, to) = (self.from(0), self.to(0));
        let (element, op) = (type_of(element), op_of(op));
        // SAFETY: memory that the plan fits, on a communicator that is alive (module page).
        let status = unsafe { result::all_reduce(from, to, count, element, op, self.handle.communicator, self.stream) };
        self.checked("ncclAllReduce", status)
    }

    fn reduce(&self, start: usize, count: usize, element: ElementType, op: ReduceOp, root: usize) -> Result<()> {
        let (from, to) = (self.from(start), self.to(0));
        let (element, op, root) = (type_of(element), op_of(op), root as c_int);
        // SAFETY: as above; the output is written on the root only.
        let status = unsafe {
            result::reduce(
                from,
                to,
                count,
                element,
                op,
                root,
                self.handle.communicator,
                self.stream,
            )
        };
        self.checked("ncclReduce", status)
    }

    fn reduce_scatter(&self, count: usize, element: ElementType, op: ReduceOp) -> Result<()> {
        let (from, to) = (self.from(0), self.to(0));
        let (element, op) = (type_of(element), op_of(op));
        // SAFETY: as above.
        let status =
            unsafe { result::reduce_scatter(from, to, count, element, op, self.handle.communicator, self.stream) };
        self.checked("ncclReduceScatter", status)
    }

    fn all_gather(&self, bytes: usize) -> Result<()> {
        let (from, to) = (self.from(0), self.to(0));
        // SAFETY: as above.
        let status = unsafe { result::all_gather(from, to, bytes, BYTES, self.handle.communicator, self.stream) };
        self.checked("ncclAllGather", status)
    }

    fn broadcast(&self, start: usize, bytes: usize, root: usize) -> Result<()> {
        let (from, to, root) = (self.from(0), self.to(start), root as c_int);
        // SAFETY: as above; the input is read on the root only.
        let status = unsafe { result::broadcast(from, to, bytes, BYTES, root, self.handle.communicator, self.stream) };
        self.checked("ncclBroadcast", status)
    }

    fn send(&self, start: usize, bytes: usize, peer: usize) -> Result<()> {
        let (from, peer) = (self.from(start), peer as c_int);
        // SAFETY: as above.
        let status = unsafe { result::send(from, bytes, BYTES, peer, self.handle.communicator, self.stream) };
        self.checked("ncclSend", status)
    }

    fn receive(&self, start: usize, bytes: usize, peer: usize) -> Result<()> {
        let (to, peer) = (self.to(start), peer as c_int);
        // SAFETY: as above.
        let status = unsafe { result::recv(to, bytes, BYTES, peer, self.handle.communicator, self.stream) };
        self.checked("ncclRecv", status)
    }

    fn from(&self, start: usize) -> *const c_void {
        (self.input as usize + start) as *const c_void
    }

    fn to(&self, start: usize) -> *mut c_void {
        (self.output as usize + start) as *mut c_void
    }

    /// A call in a group may say that it is under way: the end of the group is waited for.
    fn checked(&self, call: &'static str, status: Result<NcclStatus, NcclError>) -> Result<()> {
        self.handle.checked(call, status).map(drop)
    }
}

/// Opaque bytes, for what is moved and not reduced.
const BYTES: sys::ncclDataType_t = sys::ncclDataType_t::ncclUint8;

fn type_of(element: ElementType) -> sys::ncclDataType_t {
    match element {
        ElementType::U8 => sys::ncclDataType_t::ncclUint8,
        ElementType::U32 => sys::ncclDataType_t::ncclUint32,
        ElementType::I64 => sys::ncclDataType_t::ncclInt64,
        ElementType::F16 => sys::ncclDataType_t::ncclFloat16,
        ElementType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        ElementType::F32 => sys::ncclDataType_t::ncclFloat32,
        ElementType::F64 => sys::ncclDataType_t::ncclFloat64,
    }
}

fn op_of(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Mean => sys::ncclRedOp_t::ncclAvg,
        ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
        ReduceOp::Product => sys::ncclRedOp_t::ncclProd,
    }
}

/// Makes a place for a communicator that NCCL fills in, perhaps long after the call: it is never freed.
fn slot() -> &'static AtomicPtr<sys::ncclComm> {
    Box::leak(Box::default())
}

/// NCCL's default configuration, but for calls that return before they have ended.
fn non_blocking() -> sys::ncclConfig_t {
    // What NCCL_CONFIG_INITIALIZER has; an older library takes the part that it knows.
    const UNDEFINED: c_int = c_int::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 23007,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: std::ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: std::ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

fn refused(rank: usize, call: &'static str, error: &NcclError) -> Error {
    // SAFETY: takes any code, and returns a static text.
    let text = unsafe { sys::ncclGetErrorString(error.0) };
    // SAFETY: as above.
    let text = unsafe { CStr::from_ptr(text) };
    Error::Nccl {
        rank,
        call,
        reason: format!("{} ({:?}); NCCL_DEBUG=WARN says more", text.to_string_lossy(), error.0),
    }
}

/// Runs `last` and ends the process if it takes too long: what NCCL holds cannot be had back then.
fn or_end_the_process(rank: usize, last: impl FnOnce()) {
    let (done, is_done) = channel::<()>();
    let watchdog = std::thread::Builder::new()
        .name("sconce-nccl-end".into())
        .spawn(move || {
            if is_done.recv_timeout(LAST_MOMENT) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                // The only way left to say it.
                eprintln!("error: rank {rank} ends the process: NCCL does not give up within {LAST_MOMENT:?}");
                std::process::abort();
            }
        });
    if watchdog.is_err() {
        tracing::warn!(
            rank,
            "no thread could be started to watch over the end of a communicator"
        );
    }
    last();
    drop(done);
}
