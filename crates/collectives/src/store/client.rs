//! The store's client: blocking calls from any number of threads.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::handshake::{self, Refusal};
use super::protocol::{FRAME_TIME, LONGEST_KEY, LONGEST_VALUE, Request, Response, read_frame, write_frame};
use super::secret::Secret;
use super::server::prepare_stream;
use crate::{Error, Result};

/// How long an answer may take beyond the time the request itself allows.
const ANSWER_TIME: Duration = Duration::from_secs(30);
/// How long one attempt to connect, and one handshake, may take.
const ATTEMPT_TIME: Duration = Duration::from_secs(10);
/// Bounds of the pause between two attempts.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// Connections kept for reuse.
const MOST_IDLE: usize = 4;

/// A connection to a [`StoreServer`](super::StoreServer).
///
/// Calls block; several threads may call at once, each call in flight having a connection of its own. Keys are 1 to 1024
/// bytes, values at most 16 MiB. Names that begin with `sconce/` belong to Sconce. Once the server has stopped, every
/// call fails at once.
///
/// Every method returns [`Error::Store`] if the key or value is out of bounds, the store is full or gone, or it does not
/// answer.
pub struct StoreClient {
    address: String,
    secret: Secret,
    idle: Mutex<Vec<TcpStream>>,
}

impl StoreClient {
    /// Connects to the store at `address` (`host:port` or `[v6]:port`), trying again until it is up or `deadline` has
    /// passed.
    ///
    /// # Errors
    ///
    /// [`Error::Store`]: not reachable before the deadline; or at once, if the secret is wrong or what answers is no
    /// store.
    pub fn connect(address: &str, secret: &Secret, deadline: Duration) -> Result<Self> {
        let error = |reason| Error::Store {
            address: address.to_owned(),
            reason,
        };
        let port = address.rsplit_once(':').and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none_or(|port| port == 0) {
            return Err(error("not an address; expected `host:port` or `[v6]:port`".to_owned()));
        }
        let stream = open(address, secret, deadline, Absent::IsNotUpYet).map_err(error)?;
        Ok(Self {
            address: address.to_owned(),
            secret: secret.clone(),
            idle: Mutex::new(vec![stream]),
        })
    }

    /// Returns a client of the same store.
    pub(crate) fn again(&self) -> Self {
        Self {
            address: self.address.clone(),
            secret: self.secret.clone(),
            idle: Mutex::default(),
        }
    }

    /// Sets a key to a value, whether or not it had one, and wakes those that wait for it.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.check_value(key, value)?;
        match self.call(
            "set",
            key,
            Request::Set {
                key: key.as_bytes(),
                value,
            },
            Duration::ZERO,
        )? {
            Response::Done => Ok(()),
            _ => Err(self.unfitting("set", key)),
        }
    }

    /// Returns a key's value, `None` if it is not set.
    pub fn get(&self, key: &str) -> Result<Option<Vec<u8>>> {
        match self.call("get", key, Request::Get { key: key.as_bytes() }, Duration::ZERO)? {
            Response::Value(value) => Ok(Some(Arc::unwrap_or_clone(value))),
            Response::Absent => Ok(None),
            _ => Err(self.unfitting("get", key)),
        }
    }

    /// Returns a key's value, waiting until it is set.
    ///
    /// # Errors
    ///
    /// Also if it is not set within `deadline`.
    pub fn wait(&self, key: &str, deadline: Duration) -> Result<Vec<u8>> {
        let request = Request::Wait {
            key: key.as_bytes(),
            milliseconds: milliseconds(deadline),
        };
        match self.call("wait", key, request, deadline)? {
            Response::Value(value) => Ok(Arc::unwrap_or_clone(value)),
            Response::TimedOut { .. } => Err(self.error(format!(
                "key {key:?} was not set within {:.1} s",
                deadline.as_secs_f64()
            ))),
            _ => Err(self.unfitting("wait", key)),
        }
    }

    /// Adds to a counter and returns its new value. A key that is not set counts as 0; the value of a counter is eight
    /// little-endian bytes.
    ///
    /// # Errors
    ///
    /// Also if the key holds anything else, or the sum does not fit.
    pub fn add(&self, key: &str, amount: i64) -> Result<i64> {
        match self.call(
            "add",
            key,
            Request::Add {
                key: key.as_bytes(),
                amount,
            },
            Duration::ZERO,
        )? {
            Response::Integer(value) => Ok(value),
            _ => Err(self.unfitting("add", key)),
        }
    }

    /// Sets a key if its value is `expected` (`None`: if it is not set), in one step; returns whether it did.
    pub fn compare_and_set(&self, key: &str, expected: Option<&[u8]>, new: &[u8]) -> Result<bool> {
        self.check_value(key, expected.unwrap_or_default())?;
        self.check_value(key, new)?;
        let request = Request::CompareAndSet {
            key: key.as_bytes(),
            expected,
            value: new,
        };
        match self.call("compare_and_set", key, request, Duration::ZERO)? {
            Response::Flag(done) => Ok(done),
            _ => Err(self.unfitting("compare_and_set", key)),
        }
    }

    /// Removes a key; returns whether it was set.
    pub fn delete(&self, key: &str) -> Result<bool> {
        match self.call("delete", key, Request::Delete { key: key.as_bytes() }, Duration::ZERO)? {
            Response::Flag(done) => Ok(done),
            _ => Err(self.unfitting("delete", key)),
        }
    }

    /// Waits until `size` callers have come to the barrier `name`. The name can be used again at once: callers are
    /// counted, not told apart, and a caller that gives up or dies is no longer counted.
    ///
    /// # Errors
    ///
    /// Also if fewer came within `deadline` (the message says how many), or a caller gives another size.
    pub fn barrier(&self, name: &str, size: usize, deadline: Duration) -> Result<()> {
        let request = Request::Barrier {
            name: name.as_bytes(),
            size: size as u64,
            milliseconds: milliseconds(deadline),
        };
        match self.call("barrier", name, request, deadline)? {
            Response::Done => Ok(()),
            Response::TimedOut { came } => Err(self.error(format!(
                "barrier {name:?}: {came} of {size} came within {:.1} s; look at the output of the others",
                deadline.as_secs_f64()
            ))),
            _ => Err(self.unfitting("barrier", name)),
        }
    }

    /// Returns the address it was given.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Sends one request and takes its answer, on a connection that no other call uses meanwhile.
    fn call(&self, operation: &str, key: &str, request: Request<'_>, allowed: Duration) -> Result<Response> {
        if key.is_empty() || key.len() > LONGEST_KEY {
            let length = key.len();
            return Err(self.error(format!("{operation}: a key has 1 to {LONGEST_KEY} bytes, not {length}")));
        }
        let stream = match self.idle().pop() {
            Some(stream) => stream,
            None => open(&self.address, &self.secret, ATTEMPT_TIME, Absent::HasEnded)
                .map_err(|reason| self.error(format!("{operation} {key:?}: {reason}")))?,
        };
        let deadline = Instant::now().checked_add(allowed.saturating_add(ANSWER_TIME));
        let exchange = || -> io::Result<Response> {
            write_frame(&stream, &[], &request.encode())?;
            let frame = read_frame(&stream, deadline)?;
            Response::decode(frame).map_err(|reason| io::Error::new(io::ErrorKind::InvalidData, reason))
        };
        // After a failure the connection is dropped: an answer that came late must not meet the next request.
        let response = exchange().map_err(|error| {
            self.error(match error.kind() {
                io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                    format!("{operation} {key:?}: the connection was lost; the process that hosts the store has ended")
                }
                io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                    format!("{operation} {key:?}: no answer; the store's host or the network is down")
                }
                _ => format!("{operation} {key:?}: {error}"),
            })
        })?;
        let mut idle = self.idle();
        if idle.len() < MOST_IDLE {
            idle.push(stream);
        }
        match response {
            Response::Refused(reason) => Err(self.error(format!("{operation} {key:?}: {reason}"))),
            response => Ok(response),
        }
    }

    fn check_value(&self, key: &str, value: &[u8]) -> Result<()> {
        if value.len() > LONGEST_VALUE {
            let length = value.len();
            return Err(self.error(format!(
                "the value for {key:?} is too large: {length} bytes, at most {LONGEST_VALUE}; send tensors through a communicator"
            )));
        }
        Ok(())
    }

    fn idle(&self) -> MutexGuard<'_, Vec<TcpStream>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unfitting(&self, operation: &str, key: &str) -> Error {
        self.error(format!("{operation} {key:?}: the answer does not fit the request"))
    }

    fn error(&self, reason: String) -> Error {
        Error::Store {
            address: self.address.clone(),
            reason,
        }
    }
}

impl fmt::Debug for StoreClient {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("StoreClient")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// What it means that nobody listens.
#[derive(PartialEq)]
pub(super) enum Absent {
    IsNotUpYet,
    HasEnded,
}

/// Opens an authenticated connection, or says why not.
pub(super) fn open(address: &str, secret: &Secret, allowed: Duration, absent: Absent) -> Result<TcpStream, String> {
    let start = Instant::now();
    let mut pause = FIRST_PAUSE;
    loop {
        let left = allowed.saturating_sub(start.elapsed());
        let reason = match attempt(address, secret, left) {
            Ok(stream) => return Ok(stream),
            Err(Failure::Unreachable(reason)) if absent == Absent::HasEnded => {
                return Err(format!("the process that hosts the store has ended ({reason})"));
            }
            Err(Failure::Refused(Refusal::Stranger(reason))) => return Err(reason),
            Err(Failure::Unreachable(reason) | Failure::Refused(Refusal::Broken(reason))) => reason,
        };
        let left = allowed.saturating_sub(start.elapsed());
        if left.is_zero() {
            return Err(format!(
                "not reachable within {:.1} s: {reason}. Is the process that hosts it running (rank 0, or the launcher)?",
                allowed.as_secs_f64()
            ));
        }
        thread::sleep(pause.min(left));
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

enum Failure {
    Unreachable(String),
    Refused(Refusal),
}

fn attempt(address: &str, secret: &Secret, left: Duration) -> Result<TcpStream, Failure> {
    let unreachable = |error: io::Error| Failure::Unreachable(error.to_string());
    // Also the last attempt gets a fair chance.
    let allowed = left.clamp(LONGEST_PAUSE, ATTEMPT_TIME);
    let addresses = address
        .to_socket_addrs()
        .map_err(|error| Failure::Unreachable(format!("the host's name does not resolve: {error}")))?;
    let mut failure = Failure::Unreachable("the host's name has no address".to_owned());
    for address in addresses {
        let stream = match connect_to(address, allowed) {
            Ok(stream) => stream,
            Err(error) => {
                failure = unreachable(error);
                continue;
            }
        };
        prepare_stream(&stream).map_err(unreachable)?;
        stream.set_write_timeout(Some(FRAME_TIME)).map_err(unreachable)?;
        return match handshake::as_client(&stream, secret, Instant::now() + allowed) {
            Ok(()) => Ok(stream),
            Err(refusal) => Err(Failure::Refused(refusal)),
        };
    }
    Err(failure)
}

fn connect_to(address: SocketAddr, allowed: Duration) -> io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(&address, allowed)?;
    // A port of the range from which the system also draws the client's own: on one host a connection can then be made
    // with itself, and would even keep the server from listening.
    if stream.local_addr()? == stream.peer_addr()? {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    Ok(stream)
}

/// Whole milliseconds, not less than the duration.
fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}
