//! The one place for `unsafe`: a safe wrapper for each Postgres primitive.

pub mod boundary;
pub mod call;
pub mod compat;
pub mod datum;
pub mod heap;
pub mod index;
pub mod lock;
pub mod lwlock;
pub mod memory;
pub mod shmem;
pub mod snapshot;
pub mod xact;
