//! Hosts the rendezvous store, through which the ranks find each other.

use sconce_collectives::store::{Secret, StoreServer};

use super::place::RanksStore;
use crate::command_error::CommandError;

/// The store of this run. It serves until it is dropped.
#[derive(Debug)]
pub(super) struct Rendezvous {
    server: StoreServer,
    secret: Secret,
}

impl Rendezvous {
    /// Starts the store on a free port of this host's loopback interface, with a secret of its own.
    ///
    /// # Errors
    /// When no port can be had.
    pub(super) fn host() -> Result<Self, CommandError> {
        let secret = Secret::random();
        let server = StoreServer::start("127.0.0.1:0", secret.clone()).map_err(CommandError::failure)?;
        Ok(Self { server, secret })
    }

    /// Where ranks find the store, and what lets them in.
    pub(super) fn for_ranks(&self) -> RanksStore {
        RanksStore {
            address: self.server.address().to_string(),
            secret: self.secret.to_text(),
        }
    }
}
