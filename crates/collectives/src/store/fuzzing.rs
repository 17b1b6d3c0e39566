//! Entries for the fuzz targets (`fuzz/`), which must reach what only the wire reaches otherwise. No part of the interface.

use std::net::TcpStream;
use std::time::Duration;

use super::Secret;
use super::client::{Absent, open};
use super::protocol::{Request, Response};

/// Decodes a frame as a response and as a request; returns the encoding of the latter, if it is one.
pub fn encoded_again(frame: &[u8]) -> Option<Vec<u8>> {
    let _ = Response::decode(frame.to_vec());
    Request::decode(frame).ok().map(|request| request.encode())
}

/// Opens a connection that has proved its knowledge of the secret, and on which anything can be written.
pub fn authenticated(address: &str, secret: &Secret, deadline: Duration) -> Option<TcpStream> {
    open(address, secret, deadline, Absent::IsNotUpYet).ok()
}
