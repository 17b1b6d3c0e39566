//! Hosts the rendezvous store, through which the ranks find each other.

use sconce_collectives::environment::{SCONCE_STORE_ADDR, SCONCE_STORE_SECRET};
use sconce_collectives::store::{Secret, StoreServer};

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

    /// The environment variables that lead a rank to the store and let it in.
    pub(super) fn variables(&self) -> Vec<(&'static str, String)> {
        vec![
            (SCONCE_STORE_ADDR, self.server.address().to_string()),
            (SCONCE_STORE_SECRET, self.secret.to_text()),
        ]
    }
}
