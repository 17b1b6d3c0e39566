//! A reader of protobuf, which shares nothing with the writer.

/// One field of a message: its number and its value.
pub(super) type Field = (u64, Value);

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Integer(u64),
    Double(f64),
    Float(f32),
    Block(Vec<u8>),
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0;
    for place in 0.. {
        let byte = bytes[0];
        *bytes = &bytes[1..];
        value |= u64::from(byte & 0x7f) << (7 * place);
        if byte < 0x80 {
            break;
        }
    }
    value
}

pub(super) fn fields(mut bytes: &[u8]) -> Vec<Field> {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let mut take = |count: usize| {
            let (taken, rest) = bytes.split_at(count);
            bytes = rest;
            taken.to_vec()
        };
        let value = match key & 7 {
            0 => Value::Integer(varint(&mut bytes)),
            1 => Value::Double(f64::from_le_bytes(take(8).try_into().unwrap())),
            2 => {
                let length = varint(&mut bytes) as usize;
                let (taken, rest) = bytes.split_at(length);
                bytes = rest;
                Value::Block(taken.to_vec())
            }
            5 => Value::Float(f32::from_le_bytes(take(4).try_into().unwrap())),
            other => panic!("wire type {other}"),
        };
        fields.push((key >> 3, value));
    }
    fields
}

/// The first field of this number.
pub(super) fn get(fields: &[Field], number: u64) -> &Value {
    let found = fields.iter().find(|(other, _)| *other == number);
    &found.unwrap_or_else(|| panic!("field {number} in {fields:?}")).1
}

pub(super) fn block(fields: &[Field], number: u64) -> Vec<u8> {
    match get(fields, number) {
        Value::Block(bytes) => bytes.clone(),
        other => panic!("{other:?}"),
    }
}

pub(super) fn inner(message: &[Field], number: u64) -> Vec<Field> {
    fields(&block(message, number))
}
