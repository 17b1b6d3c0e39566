//! Every environment variable that this crate reads, with who sets it and what it means.

/// Address (`host:port`) of the rendezvous store that `sconce launch` hosts. Unset under other launchers: rank 0 then
/// hosts the store itself at `MASTER_ADDR:MASTER_PORT`.
pub const SCONCE_STORE_ADDR: &str = "SCONCE_STORE_ADDR";
/// The run's secret, which every client of the store must present. Set by `sconce launch`.
pub const SCONCE_STORE_SECRET: &str = "SCONCE_STORE_SECRET";
