//! The rendezvous store.
