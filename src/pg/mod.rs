//! The one place for `unsafe`: a safe wrapper for each Postgres primitive.

pub mod boundary;
pub mod call;
pub mod catalog;
pub mod compat;
pub mod database;
pub mod datum;
pub mod debug_point;
pub mod exit;
mod gin;
pub mod guc;
pub mod heap;
pub mod hooks;
pub mod index;
pub mod json;
pub mod latch;
pub mod lock;
pub mod log;
pub mod lwlock;
pub mod memory;
pub mod procedure;
pub mod random;
pub mod registry;
pub mod role;
pub mod sequence;
pub mod shmem;
pub mod snapshot;
pub mod spi;
pub mod trigger;
pub mod unique;
pub mod worker;
pub mod xact;

/// Whether pg_upgrade runs this server: it must do nothing of its own accord.
pub fn is_binary_upgrade() -> bool {
    // SAFETY: a plain flag, set when the server starts.
    unsafe { pgrx::pg_sys::IsBinaryUpgrade }
}
