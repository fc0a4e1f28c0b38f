//! What a session's DDL means for the workers.
//!
//! The hooks only note what may come; before commit the catalog says what is true
//! (a savepoint may have been rolled back), and the commit or the abort acts on it.

use core::cell::{Cell, RefCell};
use core::time::Duration;
use std::time::Instant;

use super::{callbacks, wake_launcher, wake_worker_of};
use crate::error::Result;
use crate::pg::{database, latch, log, registry, worker};

/// How long a worker gets to leave: as long as the server itself waits for other
/// sessions (CountOtherDBBackends, procarray.c). It reports what is left then.
const PATIENCE: Duration = Duration::from_secs(5);

const LOOK_EVERY: u64 = 5; // ms

#[derive(Clone, Copy, Debug)]
pub enum ObjectEvent {
    /// Some extension: its name is not visible yet.
    ExtensionMade,
    ExtensionDropped(u32),
    /// After the permission check (dropdb, dbcommands.c).
    DatabaseDropped(u32),
    /// One was made, or its attributes were changed.
    DatabaseChanged,
}

/// A statement that its owner gave.
#[derive(Clone, Copy, Debug)]
pub enum Statement {
    /// CREATE DATABASE ... TEMPLATE: of the source.
    CopyDatabase(u32),
    /// RENAME, SET TABLESPACE.
    MoveDatabase(u32),
    /// DROP EXTENSION awa.
    DropExtension,
}

#[derive(Default)]
struct Pending {
    extension_made: bool,
    extension_dropped: Option<u32>,
    database_changed: bool,
    database_dropped: Option<u32>,
    /// Databases that this transaction keeps without a worker.
    held: Vec<u32>,
}

thread_local! {
    static IS_PENDING: Cell<bool> = const { Cell::new(false) };
    // Never borrowed over a call of the server: FATAL runs `aborted` on top of it.
    static PENDING: RefCell<Pending> = RefCell::default();
}

/// Whether the end of this transaction means anything to us.
pub fn is_pending() -> bool {
    IS_PENDING.get()
}

pub fn on_object(event: ObjectEvent) -> Result<()> {
    match event {
        ObjectEvent::ExtensionMade => note(|pending| pending.extension_made = true),
        ObjectEvent::ExtensionDropped(extension) => {
            if database::is_ours(extension) {
                note(|pending| pending.extension_dropped = Some(extension));
            }
        }
        ObjectEvent::DatabaseChanged => note(|pending| pending.database_changed = true),
        ObjectEvent::DatabaseDropped(database) => {
            // Dropping the current database is refused right after this.
            if database != database::this_database() {
                note(|pending| pending.database_dropped = Some(database));
                send_away(database);
            }
        }
    }
    Ok(())
}

pub fn before(statement: Statement) -> Result<()> {
    match statement {
        Statement::CopyDatabase(database) => {
            if registry::with(|registry| registry.is_served(database)) == Some(true) {
                log::notice(
                    "awa will keep all queues of the copy paused",
                    "Call awa.resume_queue() there for each queue that shall run.",
                );
            }
            send_away(database);
        }
        // The current database can be neither renamed nor moved.
        Statement::MoveDatabase(database) if database == database::this_database() => {}
        Statement::MoveDatabase(database) => send_away(database),
        Statement::DropExtension => cancel_step(database::this_database()),
    }
    Ok(())
}

/// The transaction is still open and the catalog can be read.
pub fn before_commit() {
    let (made, dropped, database) = PENDING.with_borrow(|pending| {
        (pending.extension_made, pending.extension_dropped, pending.database_dropped)
    });
    if !made && dropped.is_none() && database.is_none() {
        return;
    }
    let now = if made || dropped.is_some() { database::extension() } else { None };
    let database = database.filter(|&database| !database::database_exists(database));
    PENDING.with_borrow_mut(|pending| {
        pending.extension_made = made && now.is_some();
        pending.extension_dropped = dropped.filter(|&extension| now != Some(extension));
        pending.database_dropped = database;
    });
}

pub fn committed() {
    let pending = take();
    let here = database::this_database();
    if let Some(extension) = pending.extension_dropped {
        if let Some(callbacks) = callbacks() {
            (callbacks.on_drop_extension)(here, extension);
        }
        wake_worker_of(here);
    }
    if pending.extension_made {
        registry::with(|registry| registry.request(here));
    }
    if let Some(database) = pending.database_dropped
        && let Some(callbacks) = callbacks()
    {
        (callbacks.on_drop_database)(database);
    }
    release(&pending.held);
    if pending.extension_made || pending.database_changed || !pending.held.is_empty() {
        wake_launcher();
    }
}

pub fn aborted() {
    let pending = take();
    release(&pending.held);
    if pending.extension_made {
        // It may have been used before it was gone: a worker looks, and frees its memory.
        let here = database::this_database();
        registry::with(|registry| registry.request(here));
    }
    if pending.extension_made || !pending.held.is_empty() {
        wake_launcher();
    }
}

/// PREPARE TRANSACTION: whoever resolves it looks again.
pub fn prepared() {
    let pending = take();
    release(&pending.held);
    if pending.extension_made || pending.extension_dropped.is_some() {
        registry::with(|registry| registry.note_prepared());
    }
    if !pending.held.is_empty() {
        wake_launcher();
    }
}

/// The place where the outcome of a prepared transaction becomes known.
pub fn after_commit_prepared(committed: bool) {
    if let Some(callbacks) = callbacks() {
        (callbacks.after_commit_prepared)(committed);
    }
    if committed && registry::with(|registry| registry.has_prepared()) == Some(true) {
        let here = database::this_database();
        registry::with(|registry| registry.request(here));
        wake_worker_of(here);
        wake_launcher();
    }
}

fn note(change: impl FnOnce(&mut Pending)) {
    PENDING.with_borrow_mut(change);
    IS_PENDING.set(true);
}

fn take() -> Pending {
    IS_PENDING.set(false);
    PENDING.take()
}

/// Makes the database's worker leave and keeps it away until this transaction ends.
fn send_away(database: u32) {
    // Noted first: an error or FATAL in the wait must find it.
    note(|pending| pending.held.push(database));
    if registry::with(|registry| registry.hold(database)) != Some(true) {
        PENDING.with_borrow_mut(|pending| {
            pending.held.pop();
        });
        return;
    }
    registry::with(|registry| {
        if let Some(pid) = registry.stop(database) {
            worker::terminate(pid);
        }
    });
    let patience_ends = Instant::now() + PATIENCE;
    while registry::with(|registry| registry.worker(database)).flatten().is_some()
        && Instant::now() < patience_ends
    {
        latch::wait(LOOK_EVERY);
    }
}

/// A step may be long, and holds a lock on the extension. The one who drops it should
/// not have to wait: a cancelled step is done again, or is not needed any more.
fn cancel_step(database: u32) {
    registry::with(|registry| {
        if let Some(process) = registry.worker(database) {
            worker::cancel(process.pid);
        }
    });
}

fn release(held: &[u32]) {
    for &database in held {
        registry::with(|registry| registry.release(database));
    }
}
