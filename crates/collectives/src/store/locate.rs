//! Where a run's store is, and who hosts it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::sync::OnceLock;
use std::time::Duration;

use super::secret::random_bytes;
use super::{Secret, StoreClient, StoreServer};
use crate::environment::{self as variable, Reader};
use crate::world::is_loopback;
use crate::{Error, Result, World};

/// Connects this rank to its run's store, hosting it if that falls to this rank; waits up to `deadline` for the host.
///
/// - `SCONCE_STORE_ADDR` set (by `sconce launch`): every rank connects there with `SCONCE_STORE_SECRET`.
/// - Otherwise rank 0 hosts the store at `master_addr:master_port` and every rank connects there. If
///   `TORCHELASTIC_USE_AGENT_STORE` is `True`, torchrun itself has that port, and the next one is taken.
///   Rank 0 must keep the returned server for as long as any rank needs the store.
/// - A world of one hosts a store of its own at a free loopback port.
///
/// The secret of a store that rank 0 hosts is `SCONCE_STORE_SECRET`. Without it, and if `master_addr` is loopback, it is
/// derived from the user's number, the port and the world's size. That guards against accidents between runs, not
/// against other users of this host, who can derive it too. In that case the store listens on loopback only; otherwise it
/// listens on every interface, since the name of rank 0 need not be the address of one.
///
/// Each rank of a world whose rank 0 hosts the store also claims its number there, so that two processes with the same
/// rank, or two runs on the same port, fail at once.
///
/// # Errors
///
/// - [`Error::Unset`]: the secret is missing where it cannot be derived, or `MASTER_ADDR` in a world of several hosts.
/// - [`Error::Secret`]: `SCONCE_STORE_SECRET` is too short.
/// - [`Error::Environment`]: `MASTER_PORT` leaves no next port where one is needed.
/// - [`Error::Store`]: cannot listen, not reachable, wrong secret, or the rank is taken.
pub fn join(world: &World, deadline: Duration) -> Result<(Option<StoreServer>, StoreClient)> {
    join_with(world, deadline, variable::of_process)
}

/// Does what [`join`] does with an environment given as a function from name to value.
///
/// # Errors
///
/// As [`join`].
pub fn join_with(
    world: &World,
    deadline: Duration,
    lookup: impl Fn(&str) -> Option<String>,
) -> Result<(Option<StoreServer>, StoreClient)> {
    let reader = Reader::new(&lookup);
    let secret = reader
        .text(variable::SCONCE_STORE_SECRET)
        .map(|text| Secret::from_text(&text))
        .transpose()?;
    if let Some(address) = reader.text(variable::SCONCE_STORE_ADDR) {
        let secret = secret.ok_or_else(|| Error::Unset {
            variable: variable::SCONCE_STORE_SECRET,
            reason: format!(
                "SCONCE_STORE_ADDR={address} is set, and that store admits only who knows its secret; export it on every rank"
            ),
        })?;
        return Ok((None, StoreClient::connect(&address, &secret, deadline)?));
    }
    if world.size == 1 {
        let secret = Secret::random();
        let server = StoreServer::start((Ipv4Addr::LOCALHOST, 0), secret.clone())?;
        let client = StoreClient::connect(&server.address().to_string(), &secret, deadline)?;
        return Ok((Some(server), client));
    }
    if !world.is_single_host() && reader.text(variable::MASTER_ADDR).is_none() && is_loopback(&world.master_addr) {
        return Err(Error::Unset {
            variable: variable::MASTER_ADDR,
            reason:
                "the ranks are on several hosts, and nothing says where rank 0 is; export the name or address of its \
                host on every rank"
                    .to_owned(),
        });
    }

    let host = world.master_addr.trim_start_matches('[').trim_end_matches(']');
    let port = store_port(world, &reader)?;
    let address = if host.contains(':') {
        format!("[{host}]:{port}")
    } else {
        format!("{host}:{port}")
    };
    let site = Site::of(host, port, world, secret.is_some(), &address)?;
    let secret = match secret {
        Some(secret) => secret,
        None if site.is_loopback => derived_secret(world, port)?,
        None => {
            return Err(Error::Unset {
                variable: variable::SCONCE_STORE_SECRET,
                reason: format!(
                    "rank 0 hosts the rendezvous store at {address}, where others can reach it too; export the same secret \
                     on every rank, for example the output of `openssl rand -hex 16`"
                ),
            });
        }
    };
    let (server, client) = if world.is_main() {
        let server = StoreServer::start(&site.listen[..], secret.clone())?;
        let client = StoreClient::connect(&server.reachable_here().to_string(), &secret, deadline)?;
        (Some(server), client)
    } else {
        (None, StoreClient::connect(&address, &secret, deadline)?)
    };
    claim_rank(world, &client)?;
    Ok((server, client))
}

fn store_port(world: &World, reader: &Reader<'_>) -> Result<u16> {
    let agent = reader.text(variable::TORCHELASTIC_USE_AGENT_STORE);
    if !agent.is_some_and(|value| value.eq_ignore_ascii_case("true")) {
        return Ok(world.master_port);
    }
    world.master_port.checked_add(1).ok_or_else(|| Error::Environment {
        variable: variable::MASTER_PORT,
        value: world.master_port.to_string(),
        reason: "torchrun has this port itself and there is none after it for Sconce's store; choose a lower one"
            .to_owned(),
    })
}

/// Where rank 0 listens.
struct Site {
    is_loopback: bool,
    listen: Vec<SocketAddr>,
}

impl Site {
    fn of(host: &str, port: u16, world: &World, has_secret: bool, address: &str) -> Result<Self> {
        let literal = is_loopback(host);
        let resolved = (host, port).to_socket_addrs().map(Iterator::collect::<Vec<_>>);
        let resolved = match resolved {
            Ok(resolved) => resolved,
            // The client asks again until its deadline; a name server may come up meanwhile.
            Err(_) if has_secret => Vec::new(),
            Err(error) => {
                return Err(Error::Store {
                    address: address.to_owned(),
                    reason: format!("the host's name does not resolve: {error}; check MASTER_ADDR"),
                });
            }
        };
        let is_loopback =
            literal || (!resolved.is_empty() && resolved.iter().all(|address| address.ip().is_loopback()));
        // Many hosts resolve their own name to loopback; with several hosts and a secret that is no reason to hide.
        let listens_on_loopback = literal || (is_loopback && (world.is_single_host() || !has_secret));
        let any: IpAddr = match resolved.first() {
            Some(SocketAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
            _ => Ipv4Addr::UNSPECIFIED.into(),
        };
        let listen = if listens_on_loopback {
            resolved
        } else {
            vec![SocketAddr::new(any, port)]
        };
        Ok(Self { is_loopback, listen })
    }
}

fn derived_secret(world: &World, port: u16) -> Result<Secret> {
    let user = rustix::process::getuid().as_raw();
    Secret::from_text(&format!(
        "the store of user {user} at port {port} for {} ranks",
        world.size
    ))
}

/// Claims this process's rank in the store; another process that has it already is an error.
fn claim_rank(world: &World, client: &StoreClient) -> Result<()> {
    static PROCESS: OnceLock<[u8; 32]> = OnceLock::new();
    let process = PROCESS.get_or_init(random_bytes);
    let key = format!("sconce/joined/{}", world.rank);
    if client.compare_and_set(&key, None, process)? || client.get(&key)?.as_deref() == Some(process) {
        return Ok(());
    }
    Err(Error::Store {
        address: client.address().to_owned(),
        reason: format!(
            "rank {} is taken: two processes have the same rank, or another run uses this port; give every process its own \
             RANK and every run its own MASTER_PORT",
            world.rank
        ),
    })
}
