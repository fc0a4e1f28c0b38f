//! The one place for `unsafe`: a safe wrapper for each Postgres primitive.

pub mod boundary;
pub mod call;
pub mod catalog;
pub mod compat;
pub mod datum;
pub mod debug_point;
pub mod heap;
pub mod index;
pub mod latch;
pub mod lock;
pub mod lwlock;
pub mod memory;
pub mod sequence;
pub mod shmem;
pub mod snapshot;
pub mod spi;
pub mod xact;
