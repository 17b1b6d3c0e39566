//! What a process must know to use a run's store.

use std::fmt;

use rand::TryRngCore;
use rand::rngs::OsRng;

use crate::{Error, Result};

/// Shortest text accepted as a secret, in bytes.
const SHORTEST: usize = 16;

/// The secret shared by the ranks of one run.
///
/// It never crosses the wire and never shows in `Debug`; comparison takes constant time.
#[derive(Clone)]
pub struct Secret {
    text: String,
    key: blake3::Hash,
}

impl Secret {
    /// Draws 32 bytes from the operating system.
    pub fn random() -> Self {
        Self::new(blake3::Hash::from_bytes(random_bytes()).to_hex().to_string())
    }

    /// Takes a text as secret, without the blanks around it. 32 random hexadecimal digits (16 bytes) or more are best;
    /// any text of 16 bytes or more is accepted.
    ///
    /// # Errors
    ///
    /// [`Error::Secret`] if the text is shorter. The message does not repeat it.
    pub fn from_text(text: &str) -> Result<Self> {
        let text = text.trim();
        if text.len() < SHORTEST {
            return Err(Error::Secret {
                reason: format!(
                    "it has {} characters and needs {SHORTEST} or more; `openssl rand -hex 16` makes a good one",
                    text.chars().count()
                ),
            });
        }
        Ok(Self::new(text.to_owned()))
    }

    /// Returns the text from which [`Secret::from_text`] makes an equal secret: what a launcher hands to its ranks.
    pub fn to_text(&self) -> String {
        self.text.clone()
    }

    fn new(text: String) -> Self {
        let key = blake3::derive_key("sconce-collectives rendezvous store version 1", text.as_bytes());
        Self {
            text,
            key: blake3::Hash::from_bytes(key),
        }
    }

    /// Proves knowledge of the secret for one handshake.
    pub(super) fn proof(&self, side: &str, server_nonce: &[u8; 32], client_nonce: &[u8; 32]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(self.key.as_bytes());
        hasher
            .update(side.as_bytes())
            .update(server_nonce)
            .update(client_nonce)
            .finalize()
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        // `blake3::Hash` compares in constant time.
        self.key == other.key
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret(..)")
    }
}

/// Draws 32 bytes that nobody can predict.
pub(super) fn random_bytes() -> [u8; 32] {
    let mut bytes = [0; 32];
    OsRng
        .try_fill_bytes(&mut bytes)
        .expect("the operating system's random source works once it has booted");
    bytes
}
