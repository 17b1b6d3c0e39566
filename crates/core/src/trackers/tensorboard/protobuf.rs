//! Protobuf as far as events need it: the fields of a message, one after another.
//!
//! Source: <https://protobuf.dev/programming-guides/encoding/>.

/// A message being written.
#[derive(Debug, Default)]
pub(super) struct Message(Vec<u8>);

/// How a field's bytes are to be read.
const VARINT: u64 = 0;
const EIGHT_BYTES: u64 = 1;
const LENGTH: u64 = 2;
const FOUR_BYTES: u64 = 5;

impl Message {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn integer(mut self, field: u64, value: u64) -> Self {
        self.key(field, VARINT);
        self.varint(value);
        self
    }

    pub(super) fn double(mut self, field: u64, value: f64) -> Self {
        self.key(field, EIGHT_BYTES);
        self.0.extend(value.to_le_bytes());
        self
    }

    pub(super) fn float(mut self, field: u64, value: f32) -> Self {
        self.key(field, FOUR_BYTES);
        self.0.extend(value.to_le_bytes());
        self
    }

    /// Adds text, bytes, or a message within this one.
    pub(super) fn block(mut self, field: u64, bytes: impl AsRef<[u8]>) -> Self {
        self.key(field, LENGTH);
        self.varint(bytes.as_ref().len() as u64);
        self.0.extend(bytes.as_ref());
        self
    }

    /// Adds a list of numbers, packed.
    pub(super) fn doubles(self, field: u64, values: &[f64]) -> Self {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes());
        self.block(field, Vec::from_iter(bytes))
    }

    fn key(&mut self, field: u64, kind: u64) {
        self.varint(field << 3 | kind);
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

impl AsRef<[u8]> for Message {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
