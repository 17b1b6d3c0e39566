//! Readers of files: lines, JSON lines, safetensors and, behind the feature `parquet`, Parquet.
//!
//! Whatever a file holds, reading it gives samples or an error that names the file and the place in it.

mod json_lines;
mod lines;
#[cfg(feature = "parquet")]
mod parquet_rows;
mod safetensors_rows;
mod text_lines;

pub use json_lines::JsonLines;
#[cfg(feature = "parquet")]
pub use parquet_rows::ParquetRows;
pub use safetensors_rows::SafetensorsRows;
pub use text_lines::TextLines;
