//! What the training programs of Sconce share: reading and writing of HuggingFace model folders ([`huggingface`]), and
//! text as rows of token ids ([`text`]).

#![forbid(unsafe_code)]

pub mod huggingface;
pub mod text;
