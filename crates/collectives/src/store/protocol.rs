//! Frames, requests and responses as bytes; see [the protocol](super).

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longest key or barrier name, in bytes.
pub(super) const LONGEST_KEY: usize = 1 << 10;
/// Longest value, in bytes.
pub(super) const LONGEST_VALUE: usize = 16 << 20;
/// Longest frame: compare-and-set has two values.
const LONGEST_FRAME: usize = 2 * LONGEST_VALUE + LONGEST_KEY + 64;
/// How much is allocated ahead of what has arrived, in bytes.
const PIECE: usize = 64 << 10;
/// How long the rest of a frame may take once it has begun, and one write.
pub(super) const FRAME_TIME: Duration = Duration::from_secs(30);

/// What a client asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Set {
        key: &'a [u8],
        value: &'a [u8],
    },
    Get {
        key: &'a [u8],
    },
    Wait {
        key: &'a [u8],
        milliseconds: u64,
    },
    Add {
        key: &'a [u8],
        amount: i64,
    },
    CompareAndSet {
        key: &'a [u8],
        expected: Option<&'a [u8]>,
        value: &'a [u8],
    },
    Delete {
        key: &'a [u8],
    },
    Barrier {
        name: &'a [u8],
        size: u64,
        milliseconds: u64,
    },
}

/// What the server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Response {
    Done,
    Value(Arc<Vec<u8>>),
    Absent,
    Integer(i64),
    Flag(bool),
    TimedOut { came: u64 },
    Refused(String),
}

impl<'a> Request<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut frame = Vec::new();
        match *self {
            Self::Set { key, value } => {
                frame.push(1);
                push(&mut frame, key);
                push(&mut frame, value);
            }
            Self::Get { key } => {
                frame.push(2);
                push(&mut frame, key);
            }
            Self::Wait { key, milliseconds } => {
                frame.push(3);
                push(&mut frame, key);
                frame.extend(milliseconds.to_le_bytes());
            }
            Self::Add { key, amount } => {
                frame.push(4);
                push(&mut frame, key);
                frame.extend(amount.to_le_bytes());
            }
            Self::CompareAndSet { key, expected, value } => {
                frame.push(5);
                push(&mut frame, key);
                frame.push(expected.is_some().into());
                if let Some(expected) = expected {
                    push(&mut frame, expected);
                }
                push(&mut frame, value);
            }
            Self::Delete { key } => {
                frame.push(6);
                push(&mut frame, key);
            }
            Self::Barrier {
                name,
                size,
                milliseconds,
            } => {
                frame.push(7);
                push(&mut frame, name);
                frame.extend(size.to_le_bytes());
                frame.extend(milliseconds.to_le_bytes());
            }
        }
        frame
    }

    /// # Errors
    ///
    /// What is malformed, for the log.
    pub(super) fn decode(frame: &'a [u8]) -> Result<Self, &'static str> {
        let mut fields = Fields { rest: frame };
        let request = match fields.byte()? {
            1 => Self::Set {
                key: fields.key()?,
                value: fields.value()?,
            },
            2 => Self::Get { key: fields.key()? },
            3 => Self::Wait {
                key: fields.key()?,
                milliseconds: u64::from_le_bytes(fields.array()?),
            },
            4 => Self::Add {
                key: fields.key()?,
                amount: i64::from_le_bytes(fields.array()?),
            },
            5 => {
                let key = fields.key()?;
                let expected = match fields.byte()? {
                    0 => None,
                    1 => Some(fields.value()?),
                    _ => return Err("a flag that is neither 0 nor 1"),
                };
                Self::CompareAndSet {
                    key,
                    expected,
                    value: fields.value()?,
                }
            }
            6 => Self::Delete { key: fields.key()? },
            7 => Self::Barrier {
                name: fields.key()?,
                size: u64::from_le_bytes(fields.array()?),
                milliseconds: u64::from_le_bytes(fields.array()?),
            },
            _ => return Err("an unknown request"),
        };
        fields.end()?;
        Ok(request)
    }
}

impl Response {
    /// Writes the response as one frame, without copying a value.
    pub(super) fn write(&self, stream: &TcpStream) -> io::Result<()> {
        match self {
            Self::Done => write_frame(stream, &[0], &[]),
            Self::Value(value) => write_frame(stream, &[1], value),
            Self::Absent => write_frame(stream, &[2], &[]),
            Self::Integer(value) => write_frame(stream, &[3], &value.to_le_bytes()),
            Self::Flag(flag) => write_frame(stream, &[4], &[u8::from(*flag)]),
            Self::TimedOut { came } => write_frame(stream, &[5], &came.to_le_bytes()),
            Self::Refused(reason) => write_frame(stream, &[6], reason.as_bytes()),
        }
    }

    /// # Errors
    ///
    /// What is malformed.
    pub(super) fn decode(mut frame: Vec<u8>) -> Result<Self, &'static str> {
        let mut fields = Fields { rest: &frame };
        let response = match fields.byte()? {
            0 => Self::Done,
            1 => {
                frame.remove(0);
                return Ok(Self::Value(Arc::new(frame)));
            }
            2 => Self::Absent,
            3 => Self::Integer(i64::from_le_bytes(fields.array()?)),
            4 => Self::Flag(fields.byte()? != 0),
            5 => Self::TimedOut {
                came: u64::from_le_bytes(fields.array()?),
            },
            6 => return Ok(Self::Refused(String::from_utf8_lossy(fields.rest).into_owned())),
            _ => return Err("an unknown response"),
        };
        fields.end()?;
        Ok(response)
    }
}

/// Writes the length of both parts together, and the parts.
pub(super) fn write_frame(mut stream: &TcpStream, start: &[u8], rest: &[u8]) -> io::Result<()> {
    let length = u32::try_from(start.len() + rest.len()).expect("values are checked to be at most 16 MiB");
    // One write for what is small: the socket sends at once.
    let mut first = Vec::with_capacity(4 + start.len() + if rest.len() < PIECE { rest.len() } else { 0 });
    first.extend(length.to_le_bytes());
    first.extend(start);
    if rest.len() < PIECE {
        first.extend(rest);
        return stream.write_all(&first);
    }
    stream.write_all(&first)?;
    stream.write_all(rest)
}

/// Reads one frame whose first byte may take until `deadline` (`None`: for ever) and the rest [`FRAME_TIME`].
///
/// # Errors
///
/// `UnexpectedEof` if the stream ends, `InvalidData` for a length above the limit, `TimedOut` past the deadline.
pub(super) fn read_frame(mut stream: &TcpStream, deadline: Option<Instant>) -> io::Result<Vec<u8>> {
    let mut length = [0; 4];
    match deadline {
        Some(deadline) => read_exact_before(stream, &mut length[..1], deadline)?,
        None => {
            stream.set_read_timeout(None)?;
            stream.read_exact(&mut length[..1])?;
        }
    }
    let deadline = Instant::now() + FRAME_TIME;
    read_exact_before(stream, &mut length[1..], deadline)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST_FRAME {
        let reason = format!("a frame of {length} bytes; the longest has {LONGEST_FRAME}");
        return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
    }
    let mut frame = Vec::new();
    while frame.len() < length {
        let start = frame.len();
        frame.resize(length.min(start + PIECE), 0);
        read_exact_before(stream, &mut frame[start..], deadline)?;
    }
    Ok(frame)
}

/// Fills `buffer` or fails with `TimedOut` at `deadline`, however slowly the bytes trickle in.
pub(super) fn read_exact_before(mut stream: &TcpStream, buffer: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        stream.set_read_timeout(Some(left))?;
        match stream.read(&mut buffer[filled..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => filled += count,
            // A read time-out shows as either kind, by platform; the loop looks at the clock.
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn push(frame: &mut Vec<u8>, bytes: &[u8]) {
    let length = u32::try_from(bytes.len()).expect("keys and values are checked to be at most 16 MiB");
    frame.extend(length.to_le_bytes());
    frame.extend(bytes);
}

/// The part of a frame that is still to be decoded.
struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], &'static str> {
        let (taken, rest) = self.rest.split_at_checked(count).ok_or("a frame that ends too early")?;
        self.rest = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        Ok(self.take(N)?.try_into().expect("take returns exactly N bytes"))
    }

    fn byte(&mut self) -> Result<u8, &'static str> {
        let [byte] = self.array()?;
        Ok(byte)
    }

    fn text(&mut self) -> Result<&'a [u8], &'static str> {
        let length = u32::from_le_bytes(self.array()?) as usize;
        self.take(length)
    }

    fn key(&mut self) -> Result<&'a [u8], &'static str> {
        let key = self.text()?;
        if key.is_empty() || key.len() > LONGEST_KEY {
            Err("a key that is empty or too long")
        } else {
            Ok(key)
        }
    }

    fn value(&mut self) -> Result<&'a [u8], &'static str> {
        let value = self.text()?;
        if value.len() > LONGEST_VALUE {
            Err("a value that is too long")
        } else {
            Ok(value)
        }
    }

    fn end(&self) -> Result<(), &'static str> {
        if self.rest.is_empty() {
            Ok(())
        } else {
            Err("a frame with bytes left over")
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        prop::collection::vec(any::<u8>(), 1..40)
    }

    proptest! {
        #[test]
        fn requests_decode_to_what_was_encoded(
            kind in 0..8u8, key in bytes(), value in bytes(), other in bytes(), number in any::<u64>(), size in any::<u64>()
        ) {
            let (key, value) = (&key[..], &value[..]);
            let request = match kind {
                0 => Request::Set { key, value },
                1 => Request::Get { key },
                2 => Request::Wait { key, milliseconds: number },
                3 => Request::Add { key, amount: number as i64 },
                4 => Request::CompareAndSet { key, expected: None, value },
                5 => Request::CompareAndSet { key, expected: Some(&other), value },
                6 => Request::Delete { key },
                _ => Request::Barrier { name: key, size, milliseconds: number },
            };
            let frame = request.encode();
            prop_assert_eq!(Request::decode(&frame), Ok(request));
            for cut in 0..frame.len() {
                prop_assert!(Request::decode(&frame[..cut]).is_err(), "cut to {}", cut);
            }
            let longer = [&frame[..], &[0]].concat();
            prop_assert!(Request::decode(&longer).is_err());
        }

        #[test]
        fn garbage_never_panics(frame in prop::collection::vec(any::<u8>(), 0..64), kind in 0..9u8) {
            let _ = Request::decode(&frame);
            let _ = Response::decode(frame.clone());
            let _ = Request::decode(&[&[kind][..], &frame].concat());
            let _ = Response::decode([&[kind][..], &frame].concat());
        }
    }
}
