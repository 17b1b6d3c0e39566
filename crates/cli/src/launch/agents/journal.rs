//! A journal in the store: entries are numbered from 0, each is written once and never changed.

use std::time::Duration;

use sconce_collectives::store::StoreClient;
use sconce_collectives::{Error, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Where the members' reports are.
pub(super) const REPORTS: &str = "sconce/launch/report";
/// Where the coordinator's orders are.
pub(super) const ORDERS: &str = "sconce/launch/order";

/// One journal, as one reader or writer sees it.
#[derive(Debug)]
pub(super) struct Journal {
    name: &'static str,
    next: u64,
}

impl Journal {
    /// Begins at the first entry.
    pub(super) fn new(name: &'static str) -> Self {
        Self { name, next: 0 }
    }

    /// Writes an entry behind all that are there.
    ///
    /// # Errors
    /// When the store is lost.
    pub(super) fn append(&mut self, client: &StoreClient, entry: &impl Serialize) -> Result<()> {
        let text = serde_json::to_vec(entry).expect("messages are structs of texts and numbers");
        // Who finds an entry taken tries the next: so there is never a gap that a reader would wait for.
        while !client.compare_and_set(&self.key(), None, &text)? {
            self.next += 1;
        }
        self.next += 1;
        Ok(())
    }

    /// Reads the next entry, waiting for it up to `time`; `None` if it has not come by then.
    ///
    /// # Errors
    /// When the store is lost, or an entry is none of this version's.
    pub(super) fn read<T: DeserializeOwned>(&mut self, client: &StoreClient, time: Duration) -> Result<Option<T>> {
        let key = self.key();
        let text = match client.wait(&key, time) {
            Ok(text) => text,
            // Either nothing came, or the store is lost; asking tells which.
            Err(_) => match client.get(&key)? {
                Some(text) => text,
                None => return Ok(None),
            },
        };
        self.next += 1;
        serde_json::from_slice(&text).map(Some).map_err(|error| Error::Store {
            address: client.address().to_owned(),
            reason: format!("{key} is not of this version of sconce: {error}; install the same on all machines"),
        })
    }

    fn key(&self) -> String {
        format!("{}/{}", self.name, self.next)
    }
}

/// The key under which a member tells that it is there.
pub(super) fn beat_key(id: &str) -> String {
    format!("sconce/launch/beat/{id}")
}
