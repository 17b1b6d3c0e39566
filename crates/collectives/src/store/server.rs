//! The store's server: one thread that accepts, one for each connection; see [the protocol](super).

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};

use super::entries::{Abandoned, Entries};
use super::handshake;
use super::protocol::{FRAME_TIME, Request, Response, read_frame};
use super::secret::Secret;
use crate::{Error, Result};

/// How long a connection may be pending.
const HANDSHAKE_TIME: Duration = Duration::from_secs(5);
/// Most connections, and most of them pending.
const MOST_CONNECTIONS: usize = 4096;
const MOST_PENDING: usize = 128;
/// How long a stopping server lets answers that are on their way be written.
const FAREWELL_TIME: Duration = Duration::from_secs(1);
/// How long the server pauses when the system has no more descriptors for it.
const ACCEPT_PAUSE: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};
/// A wait longer than this is as good as for ever, and can still be added to a clock.
const LONGEST_WAIT: Duration = Duration::from_secs(365 * 24 * 3600);
/// Connection threads keep their buffers on the heap and call little.
const STACK_SIZE: usize = 256 << 10;

/// A running rendezvous store.
///
/// Dropping it stops it: answers on their way are still written (for up to a second), waiting clients get an error, and
/// its threads have ended when the drop returns.
pub struct StoreServer {
    address: SocketAddr,
    /// Closing it wakes the accepting thread.
    stop: Option<UnixStream>,
    acceptor: Option<JoinHandle<()>>,
}

impl StoreServer {
    /// Listens at `address` (port 0: one that is free) for clients that know `secret`.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if the address does not resolve or cannot be listened on; [`Error::Io`] if the system refuses a
    /// thread or a descriptor.
    pub fn start(address: impl ToSocketAddrs, secret: Secret) -> Result<Self> {
        let unresolved = |error| Error::Store {
            address: "the address to listen on".to_owned(),
            reason: format!("it does not resolve: {error}"),
        };
        let candidates: Vec<SocketAddr> = address.to_socket_addrs().map_err(unresolved)?.collect();
        let listener = TcpListener::bind(&candidates[..]).map_err(|error| Error::Store {
            address: candidates
                .iter()
                .map(SocketAddr::to_string)
                .collect::<Vec<_>>()
                .join(" or "),
            reason: match error.kind() {
                io::ErrorKind::AddrInUse => {
                    "the port is in use, perhaps by another run; choose a free one with MASTER_PORT".to_owned()
                }
                _ => format!("cannot listen there: {error}"),
            },
        })?;
        let start = || -> io::Result<Self> {
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            let (stop, stopped) = UnixStream::pair()?;
            let shared = Arc::new(Shared {
                entries: Entries::new(),
                secret,
                connections: Mutex::default(),
            });
            let acceptor = thread::Builder::new()
                .name("store-accept".to_owned())
                .spawn(move || accept_until_stopped(listener, &stopped, &shared))?;
            Ok(Self {
                address,
                stop: Some(stop),
                acceptor: Some(acceptor),
            })
        };
        start().map_err(|source| Error::Io {
            context: "starting the rendezvous store".to_owned(),
            source,
        })
    }

    /// Returns the address it listens on, with the actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Returns the address at which this process reaches it, also where it listens on all interfaces.
    pub fn reachable_here(&self) -> SocketAddr {
        let mut address = self.address;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
            });
        }
        address
    }
}

impl Drop for StoreServer {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(acceptor) = self.acceptor.take() {
            // A panic there has been reported by its thread already.
            let _ = acceptor.join();
        }
    }
}

impl fmt::Debug for StoreServer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("StoreServer")
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// What the threads of one server share.
struct Shared {
    entries: Entries,
    secret: Secret,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    open: HashMap<u64, Arc<TcpStream>>,
    pending: usize,
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shut_down(&self, how: Shutdown) {
        for stream in self.connections().open.values() {
            // Fails only for a connection that is gone already.
            let _ = stream.shutdown(how);
        }
    }
}

fn accept_until_stopped(listener: TcpListener, stopped: &UnixStream, shared: &Arc<Shared>) {
    // Nothing is ever sent: every connection thread holds a sender, so that the receiver learns when all have ended.
    let (alive, all_ended) = mpsc::channel::<()>();
    let mut next_number = 0;
    loop {
        let mut ready = [
            PollFd::new(stopped, PollFlags::IN),
            PollFd::new(&listener, PollFlags::IN),
        ];
        let polled = poll(&mut ready, None);
        if polled.is_ok() && !ready[0].revents().is_empty() {
            break;
        }
        match listener.accept() {
            Ok((stream, peer)) => {
                admit(stream, peer, next_number, shared, alive.clone());
                next_number += 1;
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => {
                tracing::warn!(%error, "the rendezvous store cannot accept a connection");
                // Out of descriptors, most likely: the same connection would be reported again at once.
                let _ = poll(&mut [PollFd::new(stopped, PollFlags::IN)], Some(&ACCEPT_PAUSE));
            }
        }
    }
    drop(listener);
    drop(alive);
    shared.entries.close();
    shared.shut_down(Shutdown::Read);
    if all_ended.recv_timeout(FAREWELL_TIME) == Err(RecvTimeoutError::Timeout) {
        shared.shut_down(Shutdown::Both);
        let _ = all_ended.recv();
    }
}

fn admit(stream: TcpStream, peer: SocketAddr, number: u64, shared: &Arc<Shared>, alive: mpsc::Sender<()>) {
    let stream = Arc::new(stream);
    let mut connections = shared.connections();
    if connections.open.len() >= MOST_CONNECTIONS || connections.pending >= MOST_PENDING {
        tracing::warn!(%peer, "the rendezvous store has too many connections and closes a new one");
        return;
    }
    connections.open.insert(number, stream.clone());
    connections.pending += 1;
    drop(connections);

    let connection = Connection {
        shared: shared.clone(),
        stream,
        peer,
        number,
        is_pending: true,
        _alive: alive,
    };
    let thread = thread::Builder::new()
        .name(format!("store-{number}"))
        .stack_size(STACK_SIZE);
    if let Err(error) = thread.spawn(move || connection.serve()) {
        tracing::warn!(%peer, %error, "the rendezvous store has no thread for a connection and closes it");
    }
}

/// One connection and its place among the open ones, which it leaves when dropped, however its thread ends.
struct Connection {
    shared: Arc<Shared>,
    stream: Arc<TcpStream>,
    peer: SocketAddr,
    number: u64,
    is_pending: bool,
    _alive: mpsc::Sender<()>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut connections = self.shared.connections();
        connections.open.remove(&self.number);
        connections.pending -= usize::from(self.is_pending);
    }
}

impl Connection {
    fn serve(mut self) {
        if let Err(reason) = self.authenticate() {
            tracing::warn!(peer = %self.peer, reason, "the rendezvous store turned a connection away");
            return;
        }
        loop {
            let frame = match read_frame(&self.stream, None) {
                Ok(frame) => frame,
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return self.close_malformed(&error.to_string());
                }
                Err(error) => {
                    tracing::debug!(peer = %self.peer, %error, "a client of the rendezvous store left");
                    return;
                }
            };
            let request = match Request::decode(&frame) {
                Ok(request) => request,
                Err(reason) => return self.close_malformed(reason),
            };
            if self.shared.entries.is_closed() {
                return;
            }
            let Ok(response) = self.respond(request) else { return };
            if let Err(error) = response.write(&self.stream) {
                tracing::debug!(peer = %self.peer, %error, "a client of the rendezvous store did not take its answer");
                return;
            }
        }
    }

    fn authenticate(&mut self) -> Result<(), String> {
        let prepare = || -> io::Result<()> {
            self.stream.set_nonblocking(false)?;
            self.stream.set_write_timeout(Some(FRAME_TIME))?;
            prepare_stream(&self.stream)
        };
        prepare().map_err(|error| error.to_string())?;
        handshake::as_server(&self.stream, &self.shared.secret, Instant::now() + HANDSHAKE_TIME)?;
        self.is_pending = false;
        self.shared.connections().pending -= 1;
        Ok(())
    }

    fn respond(&self, request: Request<'_>) -> Result<Response, Abandoned> {
        let entries = &self.shared.entries;
        let after = |milliseconds| Instant::now() + Duration::from_millis(milliseconds).min(LONGEST_WAIT);
        let is_client_there = || is_peer_there(&self.stream);
        Ok(match request {
            Request::Set { key, value } => entries.set(key, value),
            Request::Get { key } => entries.get(key),
            Request::Wait { key, milliseconds } => entries.wait(key, after(milliseconds), is_client_there)?,
            Request::Add { key, amount } => entries.add(key, amount),
            Request::CompareAndSet { key, expected, value } => entries.compare_and_set(key, expected, value),
            Request::Delete { key } => entries.delete(key),
            Request::Barrier {
                name,
                size,
                milliseconds,
            } => entries.barrier(name, size, after(milliseconds), is_client_there)?,
        })
    }

    fn close_malformed(&self, reason: &str) {
        tracing::warn!(peer = %self.peer, reason, "the rendezvous store closes a connection after a malformed request");
    }
}

/// Sends small frames at once, and notices within a minute when the other host is gone without a word.
pub(super) fn prepare_stream(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    rustix::net::sockopt::set_socket_keepalive(stream, true)?;
    #[cfg(not(target_os = "openbsd"))]
    {
        rustix::net::sockopt::set_tcp_keepidle(stream, Duration::from_secs(30))?;
        rustix::net::sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
        rustix::net::sockopt::set_tcp_keepcnt(stream, 3)?;
    }
    Ok(())
}

/// Whether the peer still has its end open, without taking anything from the stream.
fn is_peer_there(stream: &TcpStream) -> bool {
    match recv(stream, &mut [0_u8; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, received)) => received > 0,
        Err(error) => error == rustix::io::Errno::AGAIN || error == rustix::io::Errno::INTR,
    }
}
