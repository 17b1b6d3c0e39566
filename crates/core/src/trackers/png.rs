//! What of a PNG file must be known: that it is one, and its size.

use super::TrackerError;

/// Returns width and height in pixels, from the file's first chunk.
pub(super) fn size(name: &str, png: &[u8]) -> Result<[u32; 2], TrackerError> {
    let number = |at: usize| {
        let bytes = png.get(at..at + 4)?;
        Some(u32::from_be_bytes(bytes.try_into().ok()?))
    };
    let reason = match (png.starts_with(b"\x89PNG\r\n\x1a\n"), number(16), number(20)) {
        (true, Some(width), Some(height)) if png.get(12..16) == Some(b"IHDR") => return Ok([width, height]),
        (true, ..) => "it is cut off",
        (false, ..) => "it does not begin as a PNG file",
    };
    Err(TrackerError::Image {
        name: name.into(),
        reason,
    })
}
