//! Training data: a file of text, or of tokens, as rows of token ids of one length.
//!
//! [`TokenRows::read`] takes what `--data` names: plain text, JSON lines, or a safetensors file of ready tokens.
//! [`TextEncoder`] turns text into ids with a `tokenizer.json`, or byte by byte where a model has none.

mod documents;
mod text_encoder;
mod token_file;
mod token_rows;

pub use text_encoder::TextEncoder;
pub use token_rows::{DEFAULT_SEQUENCE_LENGTH, TokenBatch, TokenRows};
