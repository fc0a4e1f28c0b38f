//! The one place for `unsafe`: a safe wrapper for each Postgres primitive.

pub mod boundary;
pub mod call;
pub mod compat;
pub mod datum;
pub mod lwlock;
pub mod shmem;
