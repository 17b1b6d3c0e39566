//! Checksums of files, computed by nothing that the writers use.

/// A cyclic redundancy check of 32 bits, bit by bit, by its definition as a division.
pub(super) fn checksum(data: impl IntoIterator<Item = u8>, polynomial: u32) -> u32 {
    let mut crc = u32::MAX;
    for byte in data {
        for bit in 0..8 {
            let carry = (crc ^ u32::from(byte >> bit)) & 1;
            crc >>= 1;
            if carry == 1 {
                crc ^= polynomial;
            }
        }
    }
    !crc
}
