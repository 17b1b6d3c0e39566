//! Turns text into token ids and back, by a tokenizer or byte by byte.

use std::path::Path;

use anyhow::{Context as _, Result, anyhow, bail};
use tokenizers::Tokenizer;

use super::prompt_format::MarkedText;

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
        if self.is_of_bytes() {
            return Ok(bytes(&documents.join("\n")));
        }
        let mut tokens = Vec::new();
        for (index, document) in documents.iter().enumerate() {
            let encoded = self.encode_text(document, true);
            tokens.extend(encoded.with_context(|| format!("document {} cannot be tokenized", index + 1))?);
        }
        Ok(tokens)
    }

    /// Encodes one text; a tokenizer adds its special tokens if asked to.
    ///
    /// # Errors
    /// If the tokenizer refuses it.
    pub fn encode_text(&self, text: &str, special_tokens: bool) -> Result<Vec<i64>> {
        match &self.0 {
            Encoding::Bytes => Ok(bytes(text)),
            Encoding::Tokenizer(tokenizer) => {
                let encoding = tokenizer.encode(text, special_tokens).map_err(|error| anyhow!(error))?;
                Ok(encoding.get_ids().iter().copied().map(i64::from).collect())
            }
        }
    }

    /// Encodes a text of which parts are learnt: the ids, and of each whether it is learnt. A token that begins in a learnt part
    /// is.
    ///
    /// # Errors
    /// If the tokenizer refuses it.
    pub fn encode_marked(&self, marked: &MarkedText) -> Result<(Vec<i64>, Vec<bool>)> {
        let is_learnt = |place: usize| marked.learnt.iter().any(|part| part.contains(&place));
        match &self.0 {
            Encoding::Bytes => Ok((bytes(&marked.text), (0..marked.text.len()).map(is_learnt).collect())),
            Encoding::Tokenizer(tokenizer) => {
                let encoding = tokenizer
                    .encode(marked.text.as_str(), !marked.has_special_tokens)
                    .map_err(|error| anyhow!(error))?;
                let ids = encoding.get_ids().iter().copied().map(i64::from).collect();
                // What the tokenizer adds has no place in the text.
                let learnt = |&(start, end): &(usize, usize)| start < end && is_learnt(start);
                Ok((ids, encoding.get_offsets().iter().map(learnt).collect()))
            }
        }
    }

    /// Decodes ids to text, leaving out special tokens; what is not UTF-8 is replaced.
    ///
    /// # Errors
    /// If the tokenizer refuses them.
    pub fn decode(&self, ids: &[i64]) -> Result<String> {
        match &self.0 {
            Encoding::Bytes => {
                let bytes = Vec::from_iter(ids.iter().filter_map(|id| u8::try_from(*id).ok()));
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Encoding::Tokenizer(tokenizer) => {
                let ids = Vec::from_iter(ids.iter().filter_map(|id| u32::try_from(*id).ok()));
                tokenizer.decode(&ids, true).map_err(|error| anyhow!(error))
            }
        }
    }

    /// Returns the id of a token by its text.
    pub fn id_of(&self, token: &str) -> Option<i64> {
        match &self.0 {
            Encoding::Bytes => None,
            Encoding::Tokenizer(tokenizer) => tokenizer.token_to_id(token).map(i64::from),
        }
    }

    /// Says whether ids are the bytes of the text.
    pub fn is_of_bytes(&self) -> bool {
        matches!(self.0, Encoding::Bytes)
    }
}

fn bytes(text: &str) -> Vec<i64> {
    text.bytes().map(i64::from).collect()
}
