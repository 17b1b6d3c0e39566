//! Communicators for candle: who is in the world, and moving bytes between its ranks.
//!
//! This crate owns the description of the world ([`World`]), the rendezvous store through which ranks find each
//! other ([`store`]), and the [`Communicator`] trait with its backends. It knows nothing of models, parameters or
//! optimizers.
//!
//! ```
//! use sconce_collectives::{ReduceOp, shm};
//!
//! // Two ranks as threads of this process; `connect` does the same for processes.
//! let ranks = shm::threads(2, &Default::default())?;
//! std::thread::scope(|scope| {
//!     for communicator in &ranks {
//!         scope.spawn(move || {
//!             let mut values = [communicator.rank() as f32, 1.0];
//!             communicator.all_reduce(&mut values, ReduceOp::Sum).unwrap();
//!             assert_eq!(values, [1.0, 2.0]);
//!         });
//!     }
//! });
//! # Ok::<(), sconce_collectives::Error>(())
//! ```

mod backend;
mod buffer;
pub mod collective;
mod communicator;
mod connect;
mod copy;
#[cfg(feature = "cuda")]
pub mod cuda;
mod element;
pub mod environment;
mod error;
mod flight_recorder;
pub mod measure;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "nccl")]
pub mod nccl;
mod operations;
mod options;
mod parts;
mod pending;
mod private;
mod queued;
mod reduce_op;
mod reduction;
pub mod shm;
mod single;
pub mod store;
mod sub_groups;
mod tensor;
mod traffic;
mod worker;
mod world;

pub use backend::Backend;
pub use buffer::Buffer;
pub use collective::{Collective, Counts, Each, Kind};
pub use communicator::{Communicator, Job};
pub use connect::{Connection, connect, connect_over};
pub use element::{Element, ElementType, Elements, ElementsMut};
pub use error::{Error, Result};
pub use options::Options;
pub use pending::Pending;
pub use reduce_op::ReduceOp;
pub use single::single;
pub use traffic::Traffic;
pub use world::World;
