//! Both sides of the handshake that turns a pending connection into a ready one; see [the protocol](super).

use std::io::{self, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::protocol::read_exact_before;
use super::secret::{Secret, random_bytes};

const MAGIC: [u8; 8] = *b"sconce\0\x01";
const CLIENT: &str = "sconce store client";
const SERVER: &str = "sconce store server";
const ACCEPTED: u8 = 1;

/// Why a client did not get a ready connection.
pub(super) enum Refusal {
    /// The connection ended or stalled; another attempt may do better.
    Broken(String),
    /// The other side is no store of this run; trying again is pointless.
    Stranger(String),
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Broken(match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                "the store closed the connection during the handshake: it is stopping, or has too many clients"
                    .to_owned()
            }
            io::ErrorKind::TimedOut => "something accepts connections there but does not speak like a Sconce store; \
                another program may have the port (torchrun itself listens on MASTER_PORT)"
                .to_owned(),
            _ => format!("the handshake failed: {error}"),
        })
    }
}

/// Authenticates to the server at the other end of `stream`.
pub(super) fn as_client(mut stream: &TcpStream, secret: &Secret, deadline: Instant) -> Result<(), Refusal> {
    let mut challenge = [0; 40];
    read_exact_before(stream, &mut challenge, deadline)?;
    let (magic, server_nonce) = split::<8, 32>(&challenge);
    if magic != MAGIC {
        let what = if magic[..7] == MAGIC[..7] {
            "a Sconce store of another version"
        } else {
            "not a Sconce store"
        };
        return Err(Refusal::Stranger(format!(
            "what answers there is {what}; choose another port or address"
        )));
    }
    let client_nonce = random_bytes();
    let mut answer = [0; 72];
    answer[..8].copy_from_slice(&MAGIC);
    answer[8..40].copy_from_slice(&client_nonce);
    answer[40..].copy_from_slice(secret.proof(CLIENT, &server_nonce, &client_nonce).as_bytes());
    stream.write_all(&answer)?;

    let mut verdict = [0; 33];
    read_exact_before(stream, &mut verdict, deadline)?;
    let ([accepted], proof) = split::<1, 32>(&verdict);
    if accepted != ACCEPTED || secret.proof(SERVER, &server_nonce, &client_nonce) != proof {
        return Err(Refusal::Stranger(
            "wrong secret: the store belongs to another run, or SCONCE_STORE_SECRET differs between ranks".to_owned(),
        ));
    }
    Ok(())
}

/// Lets the client at the other end of `stream` authenticate.
///
/// # Errors
///
/// The reason to log; the caller closes the connection.
pub(super) fn as_server(mut stream: &TcpStream, secret: &Secret, deadline: Instant) -> Result<(), String> {
    let server_nonce = random_bytes();
    let mut challenge = [0; 40];
    challenge[..8].copy_from_slice(&MAGIC);
    challenge[8..].copy_from_slice(&server_nonce);
    stream
        .write_all(&challenge)
        .map_err(|error| format!("writing the challenge: {error}"))?;

    let mut answer = [0; 72];
    let (start, rest) = answer.split_at_mut(8);
    let read = |part: &mut [u8]| {
        read_exact_before(stream, part, deadline).map_err(|error| format!("reading the handshake: {error}"))
    };
    read(start)?;
    if *start != MAGIC {
        return Err("not a client of this store's version".to_owned());
    }
    read(rest)?;
    let (client_nonce, proof) = split::<32, 32>(rest);
    let accepted = secret.proof(CLIENT, &server_nonce, &client_nonce) == proof;
    let mut verdict = [0; 33];
    if accepted {
        verdict[0] = ACCEPTED;
        verdict[1..].copy_from_slice(secret.proof(SERVER, &server_nonce, &client_nonce).as_bytes());
    }
    stream
        .write_all(&verdict)
        .map_err(|error| format!("writing the verdict: {error}"))?;
    if accepted {
        Ok(())
    } else {
        Err("wrong secret".to_owned())
    }
}

/// Splits a buffer of exactly `A + B` bytes.
fn split<const A: usize, const B: usize>(bytes: &[u8]) -> ([u8; A], [u8; B]) {
    let (first, second) = bytes.split_at(A);
    let whole = "the buffers of the handshake have fixed sizes";
    (first.try_into().expect(whole), second.try_into().expect(whole))
}
