//! Finding the rendezvous store from what the environment says.

use std::net::TcpListener;
use std::thread;
use std::time::Duration;

use sconce_collectives::store::{Secret, StoreClient, StoreServer, join_with};
use sconce_collectives::{Error, Result, World};

/// More than anything here takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);

fn world(rank: usize, size: usize, port: u16) -> World {
    World {
        rank,
        size,
        local_rank: rank,
        local_size: size,
        master_port: port,
        ..World::single()
    }
}

/// Joins all ranks of a world on this host and has them meet; returns the port of the store.
fn meet(port: u16, size: usize, environment: &[(&str, &str)]) -> u16 {
    let lookup = |name: &str| {
        environment
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| (*value).to_owned())
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                scope.spawn(move || {
                    let (server, client) = join_with(&world(rank, size, port), LONG, lookup).unwrap();
                    assert_eq!(server.is_some(), rank == 0);
                    client.barrier("met", size, LONG).unwrap();
                    server.map(|server| server.address().port())
                })
            })
            .collect();
        ranks
            .into_iter()
            .filter_map(|rank| rank.join().unwrap())
            .next()
            .unwrap()
    })
}

#[test]
fn rank_0_hosts_the_store_at_the_master_port() {
    let port = free_port();
    assert_eq!(meet(port, 3, &[]), port);
    let port = free_port();
    assert_eq!(meet(port, 3, &[("SCONCE_STORE_SECRET", "sixteen letters!")]), port);
}

#[test]
fn torchrun_keeps_its_own_port() {
    let port = free_port();
    assert_eq!(meet(port, 2, &[("TORCHELASTIC_USE_AGENT_STORE", "True")]), port + 1);
    let last = join_with(&world(0, 2, u16::MAX), LONG, |name| {
        (name == "TORCHELASTIC_USE_AGENT_STORE").then(|| "True".into())
    });
    assert!(
        matches!(
            last,
            Err(Error::Environment {
                variable: "MASTER_PORT",
                ..
            })
        ),
        "{last:?}"
    );
}

#[test]
fn worlds_of_one_share_no_port() {
    let one = join_with(&World::single(), LONG, |_| None).unwrap();
    let two = join_with(&World::single(), LONG, |_| None).unwrap();
    assert_eq!(one.1.add("n", 1).unwrap(), 1);
    assert_eq!(two.1.add("n", 1).unwrap(), 1);
}

#[test]
fn a_launchers_store_is_joined_with_its_secret() {
    let secret = Secret::random();
    let server = StoreServer::start("127.0.0.1:0", secret.clone()).unwrap();
    let address = server.address().to_string();
    let lookup = |with_secret: bool| {
        let (secret, address) = (secret.to_text(), address.clone());
        move |name: &str| match name {
            "SCONCE_STORE_ADDR" => Some(address.clone()),
            "SCONCE_STORE_SECRET" if with_secret => Some(secret.clone()),
            _ => None,
        }
    };
    for rank in 0..2 {
        let (server, client) = join_with(&world(rank, 2, 1), LONG, lookup(true)).unwrap();
        assert!(server.is_none());
        assert_eq!(client.add("ranks", 1).unwrap(), rank as i64 + 1);
    }
    let error = join_with(&world(0, 2, 1), LONG, lookup(false)).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Unset {
                variable: "SCONCE_STORE_SECRET",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_store_that_others_can_reach_needs_a_secret() {
    let reachable = World {
        master_addr: "192.0.2.1".to_owned(),
        ..world(1, 2, 29500)
    };
    let error = join_with(&reachable, LONG, |_| None).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Unset {
                variable: "SCONCE_STORE_SECRET",
                ..
            }
        ),
        "{error}"
    );
    let short = join_with(&reachable, LONG, |name| {
        (name == "SCONCE_STORE_SECRET").then(|| "short".into())
    })
    .unwrap_err();
    assert!(matches!(short, Error::Secret { .. }), "{short}");
    let lost = World {
        local_rank: 0,
        local_size: 1,
        node_rank: 1,
        ..world(1, 2, 29500)
    };
    let error = join_with(&lost, LONG, |_| None).unwrap_err();
    assert!(
        matches!(
            error,
            Error::Unset {
                variable: "MASTER_ADDR",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_rank_can_be_taken_once() {
    let port = free_port();
    let (_server, client) = join_with(&world(0, 3, port), LONG, |_| None).unwrap();
    client.set("sconce/joined/1", b"another process").unwrap();
    assert!(reason(join_with(&world(1, 3, port), LONG, |_| None)).contains("rank 1 is taken"));
    // The same process may come again.
    join_with(&world(2, 3, port), LONG, |_| None).unwrap();
    join_with(&world(2, 3, port), LONG, |_| None).unwrap();
    // A world of another size at the same port is another run.
    assert!(reason(join_with(&world(1, 2, port), LONG, |_| None)).contains("wrong secret"));
}

fn reason(result: Result<(Option<StoreServer>, StoreClient)>) -> String {
    match result {
        Err(Error::Store { reason, .. }) => reason,
        other => panic!("expected an error of the store, not {other:?}"),
    }
}

fn free_port() -> u16 {
    loop {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        // The one after it may be needed too.
        if port < u16::MAX && TcpListener::bind(("127.0.0.1", port + 1)).is_ok() {
            return port;
        }
    }
}
