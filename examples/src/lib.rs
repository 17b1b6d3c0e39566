//! What the training programs of Sconce share: reading and writing of HuggingFace model folders ([`huggingface`]).

#![forbid(unsafe_code)]

pub mod huggingface;
