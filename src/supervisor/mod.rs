//! The launcher, its workers, and what DDL tells them. See README.md.
#![deny(unsafe_code)]

pub mod backoff;
pub mod ddl;
pub mod launcher;
pub mod registry;
pub mod worker;

use std::sync::OnceLock;

use crate::pg;

/// What others want to know about the life of databases and extensions. All but
/// `before_commit` run where nothing may fail: arithmetic and locks only.
#[derive(Clone, Copy)]
pub struct Callbacks {
    /// The database is gone. May be told more than once.
    pub on_drop_database: fn(database: u32),
    /// The extension with this OID is gone from the database (its drop committed).
    pub on_drop_extension: fn(database: u32, extension: u32),
    /// The database has this extension, and no other; None: it has none.
    pub on_extension: fn(database: u32, extension: Option<u32>),
    /// These databases exist, all others do not.
    pub on_databases: fn(databases: &[u32]),
    /// COMMIT PREPARED (true) or ROLLBACK PREPARED has been carried out, in this
    /// database. Runs after the statement and may fail like one.
    pub after_commit_prepared: fn(committed: bool),
}

static CALLBACKS: OnceLock<Callbacks> = OnceLock::new();

/// For `_PG_init`, once.
pub fn set_callbacks(callbacks: Callbacks) {
    // A second call changes nothing.
    let _ = CALLBACKS.set(callbacks);
}

fn callbacks() -> Option<&'static Callbacks> {
    CALLBACKS.get()
}

/// Tells this database's worker that something is due sooner than it knows.
pub fn wake_worker() {
    wake_worker_of(pg::database::this_database());
}

fn wake_worker_of(database: u32) {
    if let Some(worker) = pg::registry::with(|registry| registry.wake(database)).flatten() {
        pg::worker::wake(worker);
    }
}

fn wake_launcher() {
    if let Some(launcher) = pg::registry::with(|registry| registry.launcher()).flatten() {
        pg::worker::wake(launcher);
    }
}
