//! The rendezvous store: a small TCP key-value server through which ranks find each other.
//!
//! It carries the control plane only: the NCCL id, small objects, barriers, health. Tensor data never goes through it.
//! One process hosts a [`StoreServer`] (the launcher, or rank 0); every rank holds a [`StoreClient`]; [`join`] does
//! both from what the environment says.
//!
//! ```
//! use sconce_collectives::store::{Secret, StoreClient, StoreServer};
//! use std::time::Duration;
//!
//! let secret = Secret::random();
//! let server = StoreServer::start("127.0.0.1:0", secret.clone())?;
//! let client = StoreClient::connect(&server.address().to_string(), &secret, Duration::from_secs(5))?;
//! client.set("greeting", b"hello")?;
//! assert_eq!(client.wait("greeting", Duration::from_secs(5))?, b"hello");
//! assert_eq!(client.add("ranks", 1)?, 1);
//! # Ok::<(), sconce_collectives::Error>(())
//! ```
//!
//! # Protocol, version 1
//!
//! All integers are little-endian. A connection goes through three states.
//!
//! | state | who may write | what ends it |
//! | --- | --- | --- |
//! | pending | server: *challenge*; then client: *answer*; then server: *verdict* | verdict 1: ready. Verdict 0, anything malformed, or 5 s since the connection was made: closed |
//! | ready | client: one request | a whole request: busy. Anything malformed, or 30 s between a request's first and last byte: closed |
//! | busy | server: one response | the response is written: ready. The client is gone, or the server stops: closed |
//!
//! **Handshake.** Fixed sizes, so that an unauthenticated peer makes the server allocate nothing:
//!
//! - challenge: magic (7 bytes `sconce\0`, then the version 1), server nonce (32)
//! - answer: magic (8), client nonce (32), proof (32) = `keyed_hash(key, "sconce store client" | server nonce | client nonce)`
//! - verdict: 0 or 1 (1), proof (32) = the same with `"sconce store server"`; zeros with verdict 0
//!
//! `keyed_hash` is BLAKE3's; the key is `derive_key("sconce-collectives rendezvous store version 1", secret's text)`; proofs
//! are compared in constant time. The secret
//! never crosses the wire, and both sides prove that they know it: a rank cannot join another run's store by mistake.
//! After the handshake the stream is neither encrypted nor signed. That keeps out other users and other runs, not
//! somebody who can alter packets on the way.
//!
//! **Frames.** Requests and responses are a `u32` length and that many bytes. A text or value inside is a `u32` length
//! and its bytes.
//!
//! | request | first byte, then | responses |
//! | --- | --- | --- |
//! | set | 1, key, value | done |
//! | get | 2, key | value, absent |
//! | wait | 3, key, `u64` milliseconds | value, timed out |
//! | add | 4, key, `i64` | integer |
//! | compare and set | 5, key, `u8` (1: an expected value follows; 0: expected absent), \[expected\], value | flag |
//! | delete | 6, key | flag |
//! | barrier | 7, name, `u64` size, `u64` milliseconds | done, timed out |
//!
//! | response | first byte, then |
//! | --- | --- |
//! | done | 0 |
//! | value | 1, the value's bytes up to the end of the frame |
//! | absent | 2 |
//! | integer | 3, `i64` |
//! | flag | 4, `u8` |
//! | timed out | 5, `u64` how many came (to a barrier) |
//! | refused | 6, UTF-8 reason up to the end of the frame |
//!
//! Any request may be refused: for instance, the store is full. A refusal leaves the connection ready.
//!
//! **Threads.** The server has one thread that accepts, and one for each connection. The keys, the waiting and the
//! barriers lie under one lock, which is never held during I/O. A busy thread that waits for a key or a barrier looks
//! every 200 ms whether its client is still there, and withdraws from the barrier if not. A client opens one more
//! connection for each call in flight and keeps a few for reuse.
//!
//! # Limits
//!
//! | what | limit |
//! | --- | --- |
//! | key or barrier name | 1 KiB, not empty |
//! | value | 16 MiB |
//! | all keys and values | 1 GiB |
//! | number of keys | 262 144 |
//! | connections | 4096, of which 128 pending; more are closed at once, and clients try again |
//!
//! A frame is read in pieces of at most 64 KiB: memory grows with what arrived, not with what a length promises.

mod client;
mod entries;
#[doc(hidden)]
pub mod fuzzing;
mod handshake;
mod locate;
mod protocol;
mod secret;
mod server;

pub use client::StoreClient;
pub use locate::{join, join_with};
pub use secret::Secret;
pub use server::StoreServer;
