//! The rendezvous store over real sockets.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use sconce_collectives::store::{Secret, StoreClient, StoreServer};
use sconce_collectives::{Error, Result};

/// More than anything here takes, also on a busy machine.
const LONG: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_millis(100);

fn start() -> (StoreServer, Secret, String) {
    let secret = Secret::random();
    let server = StoreServer::start("127.0.0.1:0", secret.clone()).unwrap();
    let address = server.address().to_string();
    (server, secret, address)
}

fn start_with_client() -> (StoreServer, StoreClient) {
    let (server, secret, address) = start();
    (server, StoreClient::connect(&address, &secret, LONG).unwrap())
}

fn reason<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Store { reason, .. }) => reason,
        other => panic!("expected an error of the store, not {other:?}"),
    }
}

#[track_caller]
fn assert_contains(text: &str, part: &str) {
    assert!(text.contains(part), "{text:?} does not contain {part:?}");
}

#[test]
fn every_operation_does_what_it_says() {
    let (_server, client) = start_with_client();
    assert_eq!(client.get("a").unwrap(), None);
    client.set("a", b"one").unwrap();
    client.set("empty", b"").unwrap();
    assert_eq!(client.get("a").unwrap().as_deref(), Some(&b"one"[..]));
    assert_eq!(client.get("empty").unwrap().as_deref(), Some(&b""[..]));
    assert_eq!(client.wait("a", Duration::ZERO).unwrap(), b"one");
    assert_eq!(client.add("count", 5).unwrap(), 5);
    assert_eq!(client.add("count", -7).unwrap(), -2);
    assert_eq!(client.get("count").unwrap().unwrap(), (-2_i64).to_le_bytes());
    assert!(!client.compare_and_set("a", None, b"two").unwrap());
    assert!(!client.compare_and_set("a", Some(b"on"), b"two").unwrap());
    assert!(client.compare_and_set("a", Some(b"one"), b"two").unwrap());
    assert!(client.compare_and_set("new", None, b"x").unwrap());
    assert!(!client.compare_and_set("absent", Some(b"x"), b"y").unwrap());
    assert!(client.delete("a").unwrap());
    assert!(!client.delete("a").unwrap());
    assert_eq!(client.get("a").unwrap(), None);
    client.barrier("alone", 1, Duration::ZERO).unwrap();
}

#[test]
fn refusals_say_why_and_leave_the_client_usable() {
    let (_server, client) = start_with_client();
    client.set("text", b"abc").unwrap();
    client.set("full", &i64::MAX.to_le_bytes()).unwrap();
    assert_contains(&reason(client.add("text", 1)), "did not make");
    assert_contains(&reason(client.add("full", 1)), "64 bits");
    assert_contains(&reason(client.set("", b"")), "1 to 1024 bytes, not 0");
    assert_contains(&reason(client.get(&"k".repeat(1025))), "not 1025");
    assert_contains(&reason(client.set("big", &vec![0; (16 << 20) + 1])), "too large");
    assert_contains(&reason(client.barrier("none", 0, SHORT)), "size 0");
    client.set(&"k".repeat(1024), b"").unwrap();
    let largest = vec![7; 16 << 20];
    client.set("big", &largest).unwrap();
    assert!(client.compare_and_set("big", Some(&largest), b"small").unwrap());
    assert!(client.compare_and_set("big", Some(b"small"), &largest).unwrap());
    assert!(client.get("big").unwrap().unwrap() == largest);
}

#[test]
fn a_wait_ends_when_the_key_is_set() {
    let (_server, client) = start_with_client();
    thread::scope(|scope| {
        let waiting: Vec<_> = (0..6)
            .map(|_| scope.spawn(|| client.wait("key", LONG).unwrap()))
            .collect();
        client.set("other", b"no").unwrap();
        client.set("key", b"yes").unwrap();
        for waiting in waiting {
            assert_eq!(waiting.join().unwrap(), b"yes");
        }
    });
}

#[test]
fn time_outs_name_the_key_and_how_many_came() {
    let (_server, client) = start_with_client();
    let begin = Instant::now();
    assert_contains(
        &reason(client.wait("key", SHORT)),
        "key \"key\" was not set within 0.1 s",
    );
    assert!(begin.elapsed() >= SHORT);
    assert_contains(
        &reason(client.barrier("b", 3, SHORT)),
        "barrier \"b\": 1 of 3 came within 0.1 s",
    );
    thread::scope(|scope| {
        let both: Vec<_> = (0..2)
            .map(|_| scope.spawn(|| reason(client.barrier("b", 3, SHORT * 20))))
            .collect();
        for one in both {
            assert_contains(&one.join().unwrap(), "2 of 3 came");
        }
    });
    // Nobody is left in it.
    assert_contains(&reason(client.barrier("b", 2, SHORT)), "1 of 2 came");
}

#[test]
fn concurrent_adds_lose_nothing() {
    let (_server, client) = start_with_client();
    let results: Vec<i64> = thread::scope(|scope| {
        let adders: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| (0..100).map(|_| client.add("count", 1).unwrap()).collect::<Vec<_>>()))
            .collect();
        adders.into_iter().flat_map(|adder| adder.join().unwrap()).collect()
    });
    assert_eq!(results.len(), 800);
    assert_eq!(results.into_iter().collect::<BTreeSet<_>>(), (1..=800).collect());
}

#[test]
fn a_compare_and_set_race_has_one_winner() {
    let (_server, client) = start_with_client();
    for round in 0..20 {
        let key = format!("leader/{round}");
        let winners = AtomicUsize::new(0);
        thread::scope(|scope| {
            for rank in 0..8_u8 {
                let (client, key, winners) = (&client, &key, &winners);
                scope.spawn(move || {
                    if client.compare_and_set(key, None, &[rank]).unwrap() {
                        winners.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(winners.into_inner(), 1);
    }
}

#[test]
fn a_barrier_holds_everybody_and_can_be_reused() {
    let (_server, secret, address) = start();
    let arrived = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let client = StoreClient::connect(&address, &secret, LONG).unwrap();
                for round in 1..=50 {
                    arrived.fetch_add(1, Ordering::SeqCst);
                    client.barrier("epoch", 4, LONG).unwrap();
                    // Nobody goes on to the next round before everybody is past this line.
                    assert_eq!(arrived.load(Ordering::SeqCst), 4 * round);
                    client.barrier("epoch", 4, LONG).unwrap();
                }
            });
        }
    });
}

#[test]
fn barrier_sizes_must_agree() {
    let (_server, client) = start_with_client();
    thread::scope(|scope| {
        let first = scope.spawn(|| client.barrier("b", 2, LONG));
        let other = loop {
            // Until the first is there, this one is alone with its own size.
            let text = reason(client.barrier("b", 3, Duration::from_millis(1)));
            if !text.contains("came") {
                break text;
            }
            // It may have met this one's round; then its error is the one to look at.
            if first.is_finished() {
                break reason(first.join().unwrap());
            }
        };
        assert_contains(&other, "size");
        // Lets the first go if it still waits.
        let _ = client.barrier("b", 2, SHORT);
    });
}

#[test]
fn sixty_four_clients_meet() {
    let (_server, secret, address) = start();
    thread::scope(|scope| {
        for rank in 0..64_usize {
            let (secret, address) = (&secret, &address);
            scope.spawn(move || {
                let client = StoreClient::connect(address, secret, LONG).unwrap();
                client.set(&format!("from/{rank}"), &[rank as u8]).unwrap();
                let next = (rank + 1) % 64;
                assert_eq!(client.wait(&format!("from/{next}"), LONG).unwrap(), [next as u8]);
                client.add("done", 1).unwrap();
                client.barrier("all", 64, LONG).unwrap();
                assert_eq!(client.add("done", 0).unwrap(), 64);
            });
        }
    });
}

#[test]
fn a_client_waits_for_the_server_to_come_up() {
    let address = SocketAddr::from(([127, 0, 0, 1], free_port()));
    let secret = Secret::random();
    assert_contains(
        &reason(StoreClient::connect(&address.to_string(), &secret, SHORT)),
        "not reachable within 0.1 s",
    );
    thread::scope(|scope| {
        let client = scope.spawn(|| {
            StoreClient::connect(&address.to_string(), &secret, LONG)
                .unwrap()
                .add("n", 1)
        });
        let _server = StoreServer::start(address, secret.clone()).unwrap();
        assert_eq!(client.join().unwrap().unwrap(), 1);
    });
}

#[test]
fn what_is_no_address_fails_at_once() {
    for address in ["", "localhost", "localhost:", "localhost:0", "localhost:99999"] {
        assert_contains(
            &reason(StoreClient::connect(address, &Secret::random(), LONG)),
            "not an address",
        );
    }
}

#[test]
fn a_taken_port_says_so() {
    let (_server, secret, address) = start();
    assert_contains(&reason(StoreServer::start(&address[..], secret)), "in use");
}

#[test]
fn a_wrong_secret_fails_at_once() {
    let (_server, _, address) = start();
    let begin = Instant::now();
    assert_contains(
        &reason(StoreClient::connect(&address, &Secret::random(), LONG)),
        "wrong secret",
    );
    assert!(begin.elapsed() < LONG / 2);
}

#[test]
fn a_server_that_does_not_know_the_secret_is_not_trusted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::scope(|scope| {
        scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&[b"sconce\0\x01", &[9; 32][..]].concat()).unwrap();
            stream.read_exact(&mut [0; 72]).unwrap();
            // Says yes to everybody.
            stream.write_all(&[1; 33]).unwrap();
        });
        assert_contains(
            &reason(StoreClient::connect(&address, &Secret::random(), LONG)),
            "wrong secret",
        );
    });
}

#[test]
fn another_program_on_the_port_is_recognised() {
    for (banner, expected) in [
        (
            &b"HTTP/1.1 400 Bad Request: this is not what you look for"[..],
            "not a Sconce store",
        ),
        (
            &b"sconce\0\x02 and then some 32 bytes of a later version"[..],
            "another version",
        ),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        thread::scope(|scope| {
            scope.spawn(|| listener.accept().unwrap().0.write_all(banner).unwrap());
            assert_contains(
                &reason(StoreClient::connect(&address, &Secret::random(), LONG)),
                expected,
            );
        });
    }
}

#[test]
fn ipv6_works_where_the_host_has_it() {
    let secret = Secret::random();
    match StoreServer::start("[::1]:0", secret.clone()) {
        Ok(server) => {
            let client = StoreClient::connect(&server.address().to_string(), &secret, LONG).unwrap();
            assert_eq!(client.add("n", 1).unwrap(), 1);
        }
        Err(error) => println!("skipped: no IPv6 loopback on this host ({error})"),
    }
}

#[test]
fn clients_fail_fast_when_the_server_stops() {
    let (server, client) = start_with_client();
    thread::scope(|scope| {
        let wait = scope.spawn(|| reason(client.wait("never", LONG)));
        let barrier = scope.spawn(|| reason(client.barrier("never", 2, LONG)));
        client.set("a", b"").unwrap();
        let begin = Instant::now();
        drop(server);
        for ended in [
            wait.join().unwrap(),
            barrier.join().unwrap(),
            reason(client.get("a")),
            reason(client.get("a")),
        ] {
            assert_contains(&ended, "has ended");
        }
        assert!(begin.elapsed() < Duration::from_secs(10));
    });
}

#[test]
fn the_last_barrier_ends_well_although_its_host_leaves() {
    for _ in 0..20 {
        let (server, secret, address) = start();
        let server = std::sync::Mutex::new(Some(server));
        thread::scope(|scope| {
            for rank in 0..6 {
                let (secret, address, server) = (&secret, &address, &server);
                scope.spawn(move || {
                    let client = StoreClient::connect(address, secret, LONG).unwrap();
                    client.barrier("end", 6, LONG).unwrap();
                    if rank == 0 {
                        drop(server.lock().unwrap().take());
                    }
                });
            }
        });
    }
}

/// A client written from the protocol page.
fn raw_client(address: &str, secret: &Secret) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut challenge = [0; 40];
    stream.read_exact(&mut challenge).unwrap();
    assert_eq!(challenge[..8], *b"sconce\0\x01");
    let key = blake3::derive_key(
        "sconce-collectives rendezvous store version 1",
        secret.to_text().as_bytes(),
    );
    let proof = |side: &str| blake3::keyed_hash(&key, &[side.as_bytes(), &challenge[8..], &[5; 32]].concat());
    stream
        .write_all(&[&challenge[..8], &[5; 32], proof("sconce store client").as_bytes()].concat())
        .unwrap();
    let mut verdict = [0; 33];
    stream.read_exact(&mut verdict).unwrap();
    assert_eq!(verdict[0], 1);
    assert_eq!(verdict[1..], *proof("sconce store server").as_bytes());
    stream
}

/// Reads until the other side closes; fails if it does not do so before the 30 s that a stalled frame may take.
fn read_to_close(mut stream: &TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut read = Vec::new();
    match stream.read_to_end(&mut read) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("not closed: {error}"),
        _ => read,
    }
}

fn frame(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes()[..], body].concat()
}

#[test]
fn the_protocol_is_as_documented() {
    let (_server, secret, address) = start();
    let mut stream = raw_client(&address, &secret);
    let mut ask = |body: &[u8], answer: &[u8]| {
        stream.write_all(&frame(body)).unwrap();
        let mut read = vec![0; 4 + answer.len()];
        stream.read_exact(&mut read).unwrap();
        assert_eq!(read, frame(answer), "to {body:?}");
    };
    ask(b"\x01\x03\0\0\0key\x02\0\0\0hi", b"\0");
    ask(b"\x02\x03\0\0\0key", b"\x01hi");
    ask(b"\x02\x03\0\0\0nil", b"\x02");
    ask(b"\x03\x03\0\0\0nil\x01\0\0\0\0\0\0\0", b"\x05\0\0\0\0\0\0\0\0");
    ask(
        b"\x04\x01\0\0\0n\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x03\xff\xff\xff\xff\xff\xff\xff\xff",
    );
    ask(b"\x05\x03\0\0\0key\x01\x02\0\0\0hi\x01\0\0\0x", b"\x04\x01");
    ask(b"\x05\x03\0\0\0key\0\x01\0\0\0y", b"\x04\0");
    ask(b"\x06\x03\0\0\0key", b"\x04\x01");
    ask(
        b"\x07\x01\0\0\0b\x02\0\0\0\0\0\0\0\x01\0\0\0\0\0\0\0",
        b"\x05\x01\0\0\0\0\0\0\0",
    );
}

#[test]
fn malformed_bytes_close_that_connection_only() {
    let (_server, secret, address) = start();
    let client = StoreClient::connect(&address, &secret, LONG).unwrap();
    client.set("a", b"kept").unwrap();

    // Before authentication.
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 500], b"sconce\0\x02"] {
        let mut stream = TcpStream::connect(&address).unwrap();
        stream.write_all(garbage).unwrap();
        assert!(read_to_close(&stream).len() <= 40, "only the challenge is answered");
    }
    let mut stream = TcpStream::connect(&address).unwrap();
    stream.write_all(&[b"sconce\0\x01", &[0; 64][..]].concat()).unwrap();
    let answered = read_to_close(&stream);
    assert_eq!(
        answered[40..],
        [0; 33],
        "a wrong proof is refused, and nothing is proved to it"
    );

    // After it: an oversized length, an unknown request, a key longer than its frame, a key too long, an empty frame.
    let long_key = frame(&[b"\x02\x01\x04\0\0", &[b'k'; 1025][..]].concat());
    for malformed in [
        &u32::MAX.to_le_bytes()[..],
        &frame(b"\x63"),
        &frame(b"\x02\xff\xff\xff\xffk"),
        &long_key,
        &frame(b""),
    ] {
        let mut stream = raw_client(&address, &secret);
        stream.write_all(malformed).unwrap();
        assert_eq!(read_to_close(&stream), b"");
    }
    assert_eq!(client.get("a").unwrap().unwrap(), b"kept");
}

#[test]
fn a_client_that_vanishes_is_no_longer_counted_at_a_barrier() {
    let (_server, secret, address) = start();
    let client = StoreClient::connect(&address, &secret, LONG).unwrap();
    let mut vanishing = raw_client(&address, &secret);
    // barrier "b" of 3, waiting for ever.
    vanishing
        .write_all(&frame(
            b"\x07\x01\0\0\0b\x03\0\0\0\0\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff",
        ))
        .unwrap();
    let came = |expected: &str| {
        let begin = Instant::now();
        while !reason(client.barrier("b", 3, Duration::from_millis(20))).contains(expected) {
            assert!(begin.elapsed() < LONG, "never {expected}");
        }
    };
    came("2 of 3");
    drop(vanishing);
    came("1 of 3");
}

#[test]
fn a_handshake_cannot_be_stretched_and_the_pending_are_few() {
    let (_server, secret, address) = start();
    let client = StoreClient::connect(&address, &secret, LONG).unwrap();
    let begin = Instant::now();
    let silent: Vec<_> = (0..200).map(|_| TcpStream::connect(&address).unwrap()).collect();

    // One of those that were admitted sends a byte now and then.
    let mut slow = &silent[0];
    slow.read_exact(&mut [0; 40]).unwrap();
    slow.set_read_timeout(Some(SHORT)).unwrap();
    let mut answer = b"sconce\0\x01".iter().chain(std::iter::repeat(&0));
    loop {
        // Meanwhile others are served.
        client.add("served", 1).unwrap();
        if slow.write_all(&[*answer.next().unwrap()]).is_err() {
            break;
        }
        match slow.read(&mut [0]) {
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            _ => break,
        }
        assert!(begin.elapsed() < LONG, "still open");
    }
    let stretched = begin.elapsed();
    assert!(
        stretched > Duration::from_secs(4) && stretched < Duration::from_secs(20),
        "{stretched:?}"
    );

    // At most 128 of them got a challenge; the rest was closed without one.
    let challenged = silent[1..]
        .iter()
        .filter(|stream| read_to_close(stream).len() == 40)
        .count()
        + 1;
    assert!(challenged <= 128, "{challenged}");
    StoreClient::connect(&address, &secret, LONG).unwrap();
}

#[test]
fn secrets_are_compared_by_content_and_never_shown() {
    let text = "correct horse battery staple";
    let secret = Secret::from_text(text).unwrap();
    assert_eq!(secret, Secret::from_text(&format!("  {text}\n")).unwrap());
    assert_eq!(Secret::from_text(&secret.to_text()).unwrap(), secret);
    let random = Secret::random();
    assert_eq!(Secret::from_text(&random.to_text()).unwrap(), random);
    assert_eq!(random.to_text().len(), 64);
    assert_ne!(random, Secret::random());
    assert_eq!(format!("{secret:?}"), "Secret(..)");
    let error = Secret::from_text("too-short").unwrap_err();
    assert!(matches!(error, Error::Secret { .. }));
    assert!(!format!("{error} {error:?}").contains("too-short"));
    let (server, client) = start_with_client();
    assert!(format!("{server:?} {client:?}").starts_with("StoreServer { address: 127.0.0.1:"));
}

#[test]
fn the_public_types_cross_threads() {
    fn check<T: Send + Sync>() {}
    check::<StoreServer>();
    check::<StoreClient>();
    check::<Secret>();
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}
