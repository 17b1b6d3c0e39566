//! Training data: a file of text, of tokens, or of questions and answers, as rows of token ids.
//!
//! [`TrainingData::read`] takes what `--data` names: plain text, JSON lines, Parquet, or a safetensors file of ready tokens.
//! [`TextEncoder`] turns text into ids with a `tokenizer.json`, or byte by byte where a model has none; [`PromptFormat`] writes
//! questions and answers as the model's [`ChatTemplate`] does, and says what of the text is learnt.

mod chat_template;
mod documents;
mod example_rows;
mod prompt_format;
mod sample;
mod special_tokens;
mod text_encoder;
mod token_file;
mod token_rows;
mod training_data;

pub use chat_template::{ChatTemplate, Message};
pub use example_rows::{Example, ExampleEncoder, ExampleRows, RowShape};
pub use prompt_format::{MarkedText, PromptFormat};
pub use sample::Sample;
pub use special_tokens::SpecialTokens;
pub use text_encoder::TextEncoder;
pub use token_rows::{DEFAULT_SEQUENCE_LENGTH, TokenBatch, TokenRows};
pub use training_data::{DataOptions, Divided, TrainingData};
