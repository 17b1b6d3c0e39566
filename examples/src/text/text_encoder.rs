//! Turns documents into token ids, by a tokenizer or byte by byte.

use std::path::Path;

use anyhow::{Result, anyhow, bail};
use tokenizers::Tokenizer;

/// Number of token ids of a model that reads bytes.
const BYTE_VOCABULARY: usize = 256;

/// How a model's text becomes token ids.
#[derive(Debug)]
pub struct TextEncoder(Encoding);

#[derive(Debug)]
enum Encoding {
    Tokenizer(Box<Tokenizer>),
    Bytes,
}

impl TextEncoder {
    /// Takes the tokenizer of a model, or bytes where there is none and the vocabulary has 256 ids.
    ///
    /// `tokenizer`: path of a `tokenizer.json`. `vocab_size`: number of token ids of the model.
    ///
    /// # Errors
    /// If the tokenizer cannot be read, or there is none and bytes do not fit the vocabulary.
    pub fn new(tokenizer: Option<&Path>, vocab_size: usize) -> Result<Self> {
        let Some(path) = tokenizer else {
            if vocab_size != BYTE_VOCABULARY {
                bail!(
                    "the model folder has no tokenizer.json, and its vocabulary has {vocab_size} ids; without a \
                     tokenizer text is read as bytes, which needs {BYTE_VOCABULARY}: put the model's tokenizer.json \
                     into the folder, or give a safetensors file of tokens as data"
                );
            }
            return Ok(Self(Encoding::Bytes));
        };
        let mut tokenizer = Tokenizer::from_file(path)
            .map_err(|error| anyhow!("{}: cannot be read as a tokenizer: {error}", path.display()))?;
        // A saved tokenizer may cut or pad what it encodes: that is for single inputs, not for packing.
        tokenizer
            .with_truncation(None)
            .map_err(|error| anyhow!("{}: does not let truncation be switched off: {error}", path.display()))?;
        tokenizer.with_padding(None);
        Ok(Self(Encoding::Tokenizer(Box::new(tokenizer))))
    }

    /// Encodes the documents one after the other into one stream of ids.
    ///
    /// A tokenizer adds its special tokens to each document. Bytes have none, so a newline stands between documents.
    ///
    /// # Errors
    /// If the tokenizer refuses a document; the error says which.
    pub fn encode(&self, documents: &[String]) -> Result<Vec<i64>> {
        match &self.0 {
            Encoding::Bytes => Ok(documents.join("\n").into_bytes().into_iter().map(i64::from).collect()),
            Encoding::Tokenizer(tokenizer) => {
                let mut tokens = Vec::new();
                for (index, document) in documents.iter().enumerate() {
                    let encoding = tokenizer
                        .encode(document.as_str(), true)
                        .map_err(|error| anyhow!("document {} cannot be tokenized: {error}", index + 1))?;
                    tokens.extend(encoding.get_ids().iter().copied().map(i64::from));
                }
                Ok(tokens)
            }
        }
    }
}
