//! Where the launchers meet: machine 0's hosts the store, the others connect to it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use sconce_collectives::store::{Secret, StoreClient, StoreServer};

use super::coordinator::Rules;
use super::host::Host;
use crate::command_error::CommandError;
use crate::launch::environment;
use crate::launch::round::Job;
use crate::launch::surroundings::Machines;
use crate::terminal::tell;

/// How often launchers look after each other.
const INTERVAL: Duration = Duration::from_millis(500);
/// After how long it is said that machine 0 is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// The store of the launchers, here or on machine 0.
#[derive(Debug)]
pub(super) struct Meeting {
    pub(super) address: String,
    pub(super) secret: Secret,
    /// Of another run's launchers none may take part by mistake.
    pub(super) terms: Vec<(String, String)>,
    pub(super) interval: Duration,
    /// After how long a silent launcher counts as gone.
    pub(super) keep_alive: Duration,
    hosted: Option<Hosted>,
}

#[derive(Debug)]
struct Hosted {
    coordinator: JoinHandle<()>,
    _server: StoreServer,
}

impl Meeting {
    /// Hosts the store if this is machine 0, or waits until it is there.
    ///
    /// # Errors
    /// When the port cannot be had, or machine 0 is not reached in time or does not know the secret.
    pub(super) fn open(job: &Job<'_>, machines: &Machines) -> Result<Self, CommandError> {
        let text = machines.secret.clone().unwrap_or_default();
        let secret = Secret::from_text(&text).map_err(CommandError::usage)?;
        let interval = job.arguments.machines.monitor_interval.unwrap_or(INTERVAL);
        let keep_alive = machines.conf.keep_alive.max(3 * interval);
        let terms = terms(job, machines);
        let address = machines.main_address();
        let listener = match machines.rank {
            Some(0) => Some(listens_at(machines)?),
            Some(_) => None,
            None => hosts_by_address(machines)?,
        };
        let server = match listener {
            None => None,
            Some(at) => match StoreServer::start(at, secret.clone()) {
                Ok(server) => Some((at, server)),
                // Among launchers that take numbers by themselves another one on this host may be machine 0.
                Err(_) if machines.rank.is_none() => None,
                Err(error) => {
                    return Err(
                        CommandError::failure(format!("machine 0 cannot host the store: {error}"))
                            .hint("choose another port on all machines: --main_process_port"),
                    );
                }
            },
        };
        let (address, hosted) = match server {
            Some((at, server)) => {
                let here = server.reachable_here().to_string();
                let client = connect(&here, &secret, PATIENCE)?;
                let host = Host {
                    client,
                    listens_at: at.ip(),
                    main_port: machines.main_port,
                    secret: text,
                    run_id: machines.run_id(),
                    interval,
                    rules: Rules {
                        count: machines.count,
                        max_restarts: job.arguments.max_restarts(),
                        timeout: machines.conf.timeout,
                        last_call: machines.conf.last_call,
                        keep_alive,
                        terms: terms.clone(),
                    },
                };
                let thread = thread::Builder::new().name("coordinator".to_owned());
                let coordinator = thread
                    .spawn(move || host.run())
                    .map_err(|reason| CommandError::failure(format!("cannot start a thread: {reason}")))?;
                let hosted = Hosted {
                    coordinator,
                    _server: server,
                };
                (here, Some(hosted))
            }
            None => {
                wait_for_store(&address, &secret, machines.conf.timeout)?;
                (address, None)
            }
        };
        Ok(Self {
            address,
            secret,
            terms,
            interval,
            keep_alive,
            hosted,
        })
    }

    /// Whether this launcher's is the store: then it is machine 0.
    pub(super) fn is_hosted(&self) -> bool {
        self.hosted.is_some()
    }

    /// Returns a client of the store.
    ///
    /// # Errors
    /// When it cannot be reached.
    pub(super) fn client(&self) -> Result<StoreClient, CommandError> {
        connect(&self.address, &self.secret, PATIENCE)
    }

    /// Keeps the store, where it is this launcher's, until the others have read the last order.
    pub(super) fn close(self) {
        if let Some(hosted) = self.hosted {
            // A coordinator that panicked has said so.
            let _ = hosted.coordinator.join();
        }
    }
}

/// What must be the same on all machines, and what this launcher was told.
fn terms(job: &Job<'_>, machines: &Machines) -> Vec<(String, String)> {
    let named = |name: &str, value: String| (name.to_owned(), value);
    let program = Vec::from_iter(job.program.arguments.iter().map(|word| word.to_string_lossy()));
    let mut terms = vec![
        named("the version of sconce", env!("CARGO_PKG_VERSION").to_owned()),
        named("--num_machines", machines.count.to_string()),
        named("--num_processes", machines.ranks().to_string()),
        named("--max_restarts", job.arguments.max_restarts().to_string()),
        named("the program", job.program.name.to_string_lossy().into_owned()),
        named("its arguments", program.join(" ")),
    ];
    terms.extend(environment::of_settings(job.arguments).map(|(name, value)| named(name, value)));
    terms
}

/// Where machine 0 listens: on loopback if that is its address, else wherever it may be reached.
fn listens_at(machines: &Machines) -> Result<SocketAddr, CommandError> {
    let addresses = resolve(machines)?;
    let first = addresses.first().map(SocketAddr::ip);
    let ip = match first {
        Some(ip) if machines.is_on_loopback() => ip,
        // A host's own name need not lead to the address by which others reach it.
        Some(IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    };
    Ok(SocketAddr::new(ip, machines.main_port))
}

/// Where this launcher is to listen if the address of machine 0 is one of this host's.
fn hosts_by_address(machines: &Machines) -> Result<Option<SocketAddr>, CommandError> {
    let is_here = |address: &SocketAddr| TcpListener::bind((address.ip(), 0)).is_ok();
    match resolve(machines)?.iter().any(is_here) {
        true => listens_at(machines).map(Some),
        false => Ok(None),
    }
}

fn resolve(machines: &Machines) -> Result<Vec<SocketAddr>, CommandError> {
    let resolved = (machines.bare_main_host(), machines.main_port).to_socket_addrs();
    resolved.map(Vec::from_iter).map_err(|reason: io::Error| {
        CommandError::usage(format!("--main_process_ip {}: {reason}", machines.main_host))
            .hint("give a name or address under which all machines reach machine 0")
    })
}

/// Waits until machine 0's launcher hosts the store.
fn wait_for_store(address: &str, secret: &Secret, timeout: Duration) -> Result<(), CommandError> {
    let started = Instant::now();
    if timeout > PATIENCE {
        match StoreClient::connect(address, secret, PATIENCE) {
            Ok(_) => return Ok(()),
            Err(error) if started.elapsed() < PATIENCE => return Err(not_met(error)),
            Err(_) => tell(&format!("notice: waiting for machine 0's launcher at {address}\n")),
        }
    }
    let left = timeout.saturating_sub(started.elapsed());
    StoreClient::connect(address, secret, left).map(|_| ()).map_err(not_met)
}

fn connect(address: &str, secret: &Secret, deadline: Duration) -> Result<StoreClient, CommandError> {
    StoreClient::connect(address, secret, deadline).map_err(not_met)
}

fn not_met(error: sconce_collectives::Error) -> CommandError {
    CommandError::failure(format!("the launchers do not meet: {error}")).hint(
        "--main_process_ip, --main_process_port and the secret (SCONCE_STORE_SECRET) must be the same on all machines",
    )
}
