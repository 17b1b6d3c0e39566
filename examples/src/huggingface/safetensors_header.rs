//! Reads what a safetensors file says it holds, without reading what it holds.
//!
//! The `safetensors` crate checks a header only against a buffer of the whole file. Model files are large and a memory
//! map needs `unsafe`, so this reads the header alone and lets the crate check it; only the length is compared here.
//! Format: 8 bytes of header length (u64, little endian), the header as JSON, the data.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, Result, ensure};
use safetensors::tensor::Metadata;

/// The limit of the `safetensors` crate.
const MAX_HEADER_BYTES: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;

/// Reads and checks the header: tensors cover the file's data exactly, and their sizes fit shapes and dtypes.
///
/// # Errors
/// If the file cannot be read, is truncated, or has a malformed header. Every error names the file.
pub(super) fn read_safetensors_header(path: &Path) -> Result<Metadata> {
    let read = || -> Result<Metadata> {
        let mut file = File::open(path)?;
        let file_bytes = file.metadata()?.len();
        ensure!(
            file_bytes >= LENGTH_BYTES,
            "the file has {file_bytes} bytes, expected at least {LENGTH_BYTES}"
        );
        let mut length = [0u8; LENGTH_BYTES as usize];
        file.read_exact(&mut length)?;
        let header_bytes = u64::from_le_bytes(length);
        ensure!(
            header_bytes <= MAX_HEADER_BYTES && header_bytes <= file_bytes - LENGTH_BYTES,
            "the header claims {header_bytes} bytes in a file of {file_bytes} bytes"
        );
        let mut header = vec![0u8; header_bytes as usize];
        file.read_exact(&mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header).context("the header is malformed")?;
        // Not added up: the claimed lengths come from the file and may overflow.
        let data_bytes = file_bytes - LENGTH_BYTES - header_bytes;
        ensure!(
            metadata.data_len() as u64 == data_bytes,
            "the header describes {} bytes of tensors and {data_bytes} bytes follow",
            metadata.data_len()
        );
        Ok(metadata)
    };
    read().with_context(|| {
        format!(
            "{}: is not a complete safetensors file; copy or download it again",
            path.display()
        )
    })
}
