//! The calls of MPI's C interface, each with its return code checked.
//!
//! The bare bindings are used because wrappers throw return codes away. Errors are set to return, so that they become
//! [`Error::Mpi`] with MPI's own message.
//!
//! # Safety
//! - The library is initialised once, before any other call, and finalised only by [`finalise`], after which nothing calls
//!   it any more ([`Library::is_ended`]).
//! - Calls come from any thread: MPI grants `MPI_THREAD_MULTIPLE`, or else one lock is around each of them.
//! - Memory is handed to MPI as a [`Private`], which its page says is lent for the whole operation. [`Requests`] keeps the
//!   requests on it; an operation does not return before they have ended, or else ends the process (`waiting`, and
//!   [`Requests`] when it is dropped).

use crate::private::Private;
use crate::{Error, Result};
use mpi_sys as ffi;
use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Largest message, in bytes: longer ranges go as several. Far below MPI's own limit of 2^31 - 1 elements.
pub(super) const LARGEST_MESSAGE: usize = 1 << 20;

/// The initialised library.
#[derive(Debug)]
pub(super) struct Library {
    /// This process's rank in MPI's world.
    pub(super) rank: usize,
    /// How many ranks MPI's world has.
    pub(super) size: usize,
    /// All ranks; this library's own, so that its messages meet nobody else's.
    pub(super) world: Channel,
    /// Held around each call where MPI allows one thread at a time.
    one_at_a_time: Option<Mutex<()>>,
    is_ended: AtomicBool,
    /// Operations under way, on any group.
    pub(super) under_way: AtomicUsize,
}

/// A communicator of MPI's. They are never freed: a program makes few, and freeing is collective.
#[derive(Debug, Clone, Copy)]
pub(super) struct Channel(ffi::MPI_Comm);

// SAFETY: a handle, which MPI allows every thread to use (module page).
unsafe impl Send for Channel {}
// SAFETY: as above.
unsafe impl Sync for Channel {}

impl Library {
    /// Returns the library; the first call initialises MPI, which all ranks of a job must do.
    ///
    /// # Errors
    /// When MPI cannot be initialised, or does not allow calls from several threads even in turn.
    pub(super) fn get() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
        LIBRARY.get_or_init(Self::initialise).as_ref().map_err(|reason| {
            let (what, hint) = ("MPI cannot be used".to_owned(), reason.clone());
            Error::Unsupported { what, hint }
        })
    }

    fn initialise() -> Result<Self, String> {
        let (mut initialised, mut provided, mut size, mut rank) = (0, 0, 0, 0);
        let checked = |call: &str, code: c_int| match code {
            0 => Ok(()),
            code => Err(format!("{call}: {}", message(code))),
        };
        // SAFETY: allowed at any time; the pointer is to a local.
        checked("MPI_Initialized", unsafe { ffi::MPI_Initialized(&raw mut initialised) })?;
        if initialised != 0 {
            return Err("something else in this process has initialised it; let Sconce do so".into());
        }
        let null = std::ptr::null_mut();
        // SAFETY: a constant of the library.
        let wanted = unsafe { ffi::RSMPI_THREAD_MULTIPLE };
        // SAFETY: not initialised yet, and `OnceLock` runs this once; null arguments are allowed.
        let code = unsafe { ffi::MPI_Init_thread(null, null.cast(), wanted, &raw mut provided) };
        checked("MPI_Init_thread", code)?;
        // SAFETY: a constant of the library.
        let least = unsafe { ffi::RSMPI_THREAD_SERIALIZED };
        if provided < least {
            return Err(format!(
                "it grants thread level {provided}, but level {least} (MPI_THREAD_SERIALIZED) is needed; use a library \
                 built with thread support"
            ));
        }
        // SAFETY: a constant of the library.
        let all = unsafe { ffi::RSMPI_COMM_WORLD };
        let mut world = all;
        // SAFETY: initialised; all ranks of the job make this call first.
        checked("MPI_Comm_dup", unsafe { ffi::MPI_Comm_dup(all, &raw mut world) })?;
        // SAFETY: a constant of the library.
        let errors_return = unsafe { ffi::RSMPI_ERRORS_RETURN };
        // SAFETY: a valid communicator; those split off it inherit the handler.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(world, errors_return) };
        checked("MPI_Comm_set_errhandler", code)?;
        // SAFETY: a valid communicator and a local.
        checked("MPI_Comm_size", unsafe { ffi::MPI_Comm_size(world, &raw mut size) })?;
        // SAFETY: as above.
        checked("MPI_Comm_rank", unsafe { ffi::MPI_Comm_rank(world, &raw mut rank) })?;
        Ok(Self {
            rank: rank as usize,
            size: size as usize,
            world: Channel(world),
            one_at_a_time: (provided < wanted).then(Mutex::default),
            is_ended: AtomicBool::new(false),
            under_way: AtomicUsize::new(0),
        })
    }

    fn call(&self, call: &'static str, function: impl FnOnce() -> c_int) -> Result<()> {
        let failed = |reason| Error::Mpi {
            rank: self.rank,
            call,
            reason,
        };
        if self.is_ended() {
            return Err(failed("the process is ending".into()));
        }
        let lock = self.one_at_a_time.as_ref();
        let _turn = lock.map(|lock| lock.lock().unwrap_or_else(PoisonError::into_inner));
        match function() {
            0 => Ok(()),
            code => Err(failed(message(code))),
        }
    }

    /// Makes one group for each color; called by all ranks of `channel`. Returns `None` to those without a color.
    pub(super) fn split(&self, channel: Channel, color: Option<u32>, place: usize) -> Result<Option<Channel>> {
        // SAFETY: a constant of the library.
        let none = unsafe { ffi::RSMPI_UNDEFINED };
        let color_or_none = color.map_or(none, |color| color as c_int);
        let mut made = channel.0;
        self.call("MPI_Comm_split", || {
            // SAFETY: a valid communicator; all its ranks have just agreed to make this call.
            unsafe { ffi::MPI_Comm_split(channel.0, color_or_none, place as c_int, &raw mut made) }
        })?;
        Ok(color.map(|_| Channel(made)))
    }

    /// Takes a message with `tag`, from `rank` or anyone, if there is one; returns its source and length.
    pub(super) fn take(
        &self,
        channel: Channel,
        rank: Option<usize>,
        tag: c_int,
        memory: &mut [u8],
    ) -> Result<Option<(usize, usize)>> {
        // SAFETY: constants of the library.
        let (anyone, bytes) = unsafe { (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_UINT8_T) };
        let from = rank.map_or(anyone, |rank| rank as c_int);
        let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
        let (mut found, mut length) = (0, 0);
        // SAFETY: a constant of the library.
        let mut message = unsafe { ffi::RSMPI_MESSAGE_NULL };
        self.call("MPI_Improbe", || {
            // SAFETY: a valid communicator, and locals.
            unsafe {
                ffi::MPI_Improbe(
                    from,
                    tag,
                    channel.0,
                    &raw mut found,
                    &raw mut message,
                    status.as_mut_ptr(),
                )
            }
        })?;
        if found == 0 {
            return Ok(None);
        }
        let most = c_int::try_from(memory.len()).unwrap_or(c_int::MAX);
        self.call("MPI_Mrecv", || {
            // SAFETY: the message was just found, and belongs to nobody else; `most` bytes are ours to write.
            unsafe {
                ffi::MPI_Mrecv(
                    memory.as_mut_ptr().cast(),
                    most,
                    bytes,
                    &raw mut message,
                    status.as_mut_ptr(),
                )
            }
        })?;
        self.call("MPI_Get_count", || {
            // SAFETY: the status was written by the call above.
            unsafe { ffi::MPI_Get_count(status.as_ptr(), bytes, &raw mut length) }
        })?;
        // SAFETY: a plain C structure, zeroed and then written.
        let status = unsafe { status.assume_init() };
        Ok(Some((status.MPI_SOURCE as usize, length as usize)))
    }

    /// Says whether a message with `tag` has come from `rank`; it stays there.
    pub(super) fn has_come(&self, channel: Channel, rank: usize, tag: c_int) -> Result<bool> {
        let mut found = 0;
        self.call("MPI_Iprobe", || {
            // SAFETY: a valid communicator and a rank of it; the status is not wanted.
            unsafe { ffi::MPI_Iprobe(rank as c_int, tag, channel.0, &raw mut found, ffi::RSMPI_STATUS_IGNORE) }
        })?;
        Ok(found != 0)
    }

    /// Ends this process, and with it the job.
    pub(super) fn abort(&self) -> ! {
        // Where one thread at a time may call MPI, another may never come back from it.
        let is_free = self.one_at_a_time.as_ref().is_none_or(|lock| lock.try_lock().is_ok());
        if is_free {
            let _ = self.call("MPI_Abort", || {
                // SAFETY: allowed from any thread between initialising and finalising.
                unsafe { ffi::MPI_Abort(self.world.0, 1) }
            });
        }
        std::process::abort()
    }

    /// Ends the library; all ranks must call it.
    pub(super) fn finalise(&self) -> Result<()> {
        self.call("MPI_Finalize", || {
            self.is_ended.store(true, SeqCst);
            // SAFETY: initialised, no operation is under way (the caller's duty), and no call follows.
            unsafe { ffi::MPI_Finalize() }
        })
    }

    pub(super) fn is_ended(&self) -> bool {
        self.is_ended.load(SeqCst)
    }
}

/// Asks the library for its name and version; allowed at any time.
pub(super) fn version() -> Result<String> {
    let mut text = [0 as c_char; ffi::MPI_MAX_LIBRARY_VERSION_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: room for the longest version and its end.
    let code = unsafe { ffi::MPI_Get_library_version(text.as_mut_ptr(), &raw mut length) };
    if code != 0 {
        let (what, hint) = (
            format!("MPI does not tell its version (code {code})"),
            "see `mpirun --version`".into(),
        );
        return Err(Error::Unsupported { what, hint });
    }
    Ok(until_end(&text))
}

/// Has `at_exit` called when the process ends in an orderly way.
pub(super) fn call_at_exit(at_exit: extern "C" fn()) {
    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
    // SAFETY: C's own function; `at_exit` does not unwind (it is `extern "C"`). Without a place for it, MPI is not
    // finalised, which mpirun reports.
    let _ = unsafe { atexit(at_exit) };
}

/// Sends and receives under way.
#[derive(Debug, Default)]
pub(super) struct Requests {
    posted: Vec<Posted>,
    /// How many of them, from the first, have ended.
    ended: usize,
}

#[derive(Debug)]
struct Posted {
    request: ffi::MPI_Request,
    peer: usize,
    is_receive: bool,
}

// SAFETY: requests may be completed by another thread than the one that made them.
unsafe impl Send for Requests {}

impl Requests {
    /// Starts to send `memory`; it must stay as it is until the request has ended.
    pub(super) fn send(
        &mut self,
        library: &Library,
        channel: Channel,
        memory: Private,
        to: usize,
        tag: c_int,
    ) -> Result<()> {
        for part in messages(memory) {
            // SAFETY: constants of the library.
            let (mut request, bytes) = unsafe { (ffi::RSMPI_REQUEST_NULL, ffi::RSMPI_UINT8_T) };
            library.call("MPI_Isend", || {
                let (start, count) = (part.pointer().cast_const().cast(), part.len() as c_int);
                // SAFETY: the memory is lent until the request has ended (module page).
                unsafe { ffi::MPI_Isend(start, count, bytes, to as c_int, tag, channel.0, &raw mut request) }
            })?;
            self.posted.push(Posted {
                request,
                peer: to,
                is_receive: false,
            });
        }
        Ok(())
    }

    /// Starts to receive into `memory`, which nobody may touch until the request has ended.
    pub(super) fn receive(
        &mut self,
        library: &Library,
        channel: Channel,
        memory: Private,
        from: usize,
        tag: c_int,
    ) -> Result<()> {
        assert!(memory.is_writable(), "the range was lent for writing");
        for part in messages(memory) {
            // SAFETY: constants of the library.
            let (mut request, bytes) = unsafe { (ffi::RSMPI_REQUEST_NULL, ffi::RSMPI_UINT8_T) };
            library.call("MPI_Irecv", || {
                let (start, count) = (part.pointer().cast(), part.len() as c_int);
                // SAFETY: the memory is lent for writing until the request has ended (module page).
                unsafe { ffi::MPI_Irecv(start, count, bytes, from as c_int, tag, channel.0, &raw mut request) }
            })?;
            self.posted.push(Posted {
                request,
                peer: from,
                is_receive: true,
            });
        }
        Ok(())
    }

    /// Returns how many were posted so far.
    pub(super) fn len(&self) -> usize {
        self.posted.len()
    }

    /// Lets MPI make progress, and says whether the first `count` have ended.
    pub(super) fn have_ended(&mut self, library: &Library, count: usize) -> Result<bool> {
        while self.ended < count {
            if !test(library, &mut self.posted[self.ended].request)? {
                return Ok(false);
            }
            self.ended += 1;
        }
        Ok(true)
    }

    /// Returns the ranks with which a message is still to be exchanged.
    pub(super) fn missing(&mut self, library: &Library) -> Vec<usize> {
        let mut missing = Vec::new();
        for posted in &mut self.posted[self.ended..] {
            if !test(library, &mut posted.request).unwrap_or(false) {
                missing.push(posted.peer);
            }
        }
        missing.sort_unstable();
        missing.dedup();
        missing
    }

    /// Gives up the receives whose messages have not begun to come; they end soon.
    pub(super) fn cancel_receives(&mut self, library: &Library) {
        // SAFETY: a constant of the library.
        let null = unsafe { ffi::RSMPI_REQUEST_NULL };
        for posted in self.posted[self.ended..].iter_mut().filter(|posted| posted.is_receive) {
            if posted.request != null {
                // What cannot be cancelled stays posted, which the caller finds by testing.
                let _ = library.call("MPI_Cancel", || {
                    // SAFETY: an active request of ours.
                    unsafe { ffi::MPI_Cancel(&raw mut posted.request) }
                });
            }
        }
    }

    /// Forgets the requests that have ended; all must have.
    pub(super) fn clear(&mut self) {
        debug_assert_eq!(self.ended, self.posted.len(), "all requests have ended");
        self.posted.clear();
        self.ended = 0;
    }
}

impl Drop for Requests {
    fn drop(&mut self) {
        if self.ended < self.posted.len() {
            // Only a panic in the middle of an operation comes here: its memory must not go while MPI holds it.
            eprintln!("error: an operation was left while MPI holds its memory; the process ends");
            std::process::abort();
        }
    }
}

/// Says whether a request has ended; one that has may be tested again.
fn test(library: &Library, request: &mut ffi::MPI_Request) -> Result<bool> {
    let mut ended = 0;
    library.call("MPI_Test", || {
        // SAFETY: a request of ours, or null; the status is not wanted.
        unsafe { ffi::MPI_Test(&raw mut *request, &raw mut ended, ffi::RSMPI_STATUS_IGNORE) }
    })?;
    Ok(ended != 0)
}

/// Cuts a range into messages.
fn messages(memory: Private) -> impl Iterator<Item = Private> {
    let starts = (0..memory.len()).step_by(LARGEST_MESSAGE);
    starts.map(move |start| memory.part(start..(start + LARGEST_MESSAGE).min(memory.len())))
}

/// MPI's own words for a return code.
fn message(code: c_int) -> String {
    let mut text = [0 as c_char; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut length = 0;
    // SAFETY: room for the longest message and its end.
    let told = unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut length) };
    if told != 0 {
        return format!("error {code}");
    }
    until_end(&text)
}

/// The characters before the first zero.
fn until_end(text: &[c_char]) -> String {
    let bytes = Vec::from_iter(text.iter().map(|character| *character as u8));
    let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_beyond_mpis_counts_go_as_several_messages() {
        // Never touched, so it is no memory but addresses.
        let long = vec![0u8; (1 << 31) + 5];
        let lengths: Vec<usize> = messages(Private::of(&long)).map(|message| message.len()).collect();
        assert!(lengths.iter().all(|length| (1..=LARGEST_MESSAGE).contains(length)));
        assert_eq!(lengths.iter().sum::<usize>(), long.len());
        assert_eq!(messages(Private::of(&[])).count(), 0);
    }
}
