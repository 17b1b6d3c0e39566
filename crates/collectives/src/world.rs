//! Who is in the world.

/// This process's place among the ranks of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct World {
    /// This process's number, from 0 to `size - 1`.
    pub rank: usize,
    /// How many ranks there are in all.
    pub size: usize,
    /// This process's number on its own host.
    pub local_rank: usize,
    /// How many ranks this host has.
    pub local_size: usize,
    /// The number of this host.
    pub node_rank: usize,
    /// Host name or address of rank 0.
    pub master_addr: String,
    /// Port of the rendezvous store on `master_addr`.
    pub master_port: u16,
}
