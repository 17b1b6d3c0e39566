//! From "who am I" to a group of all ranks.

use crate::store::{StoreClient, StoreServer, join};
use crate::{Communicator, Options, Result, World, shm, single};
use std::sync::Arc;

/// A connection of this process to all ranks of the world.
#[derive(Debug)]
pub struct Connection {
    /// The group of all ranks.
    pub communicator: Arc<dyn Communicator>,
    /// The rendezvous store's client; `None` in a world of one, which needs no store.
    pub store: Option<StoreClient>,
    /// The store itself, where this rank hosts it.
    _server: Option<StoreServer>,
}

/// Joins the ranks that the world describes; called by all ranks.
///
/// # Errors
/// When the store cannot be reached, ranks do not come in time, or no backend serves this world.
pub fn connect(world: &World, options: &Options) -> Result<Connection> {
    if world.size == 1 {
        return Ok(Connection {
            communicator: single(),
            store: None,
            _server: None,
        });
    }
    let (server, client) = join(world, options.timeout)?;
    let communicator = shm::connect(world, &client, options)?;
    Ok(Connection {
        communicator,
        store: Some(client),
        _server: server,
    })
}
