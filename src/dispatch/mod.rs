//! The dispatcher of `domain` in shared memory: its lock, and what a backend keeps
//! about its own transaction.
//!
//! One lock guards all of it (docs/adr/0001-one-dispatcher-lock.md). Sections under
//! the lock are short, allocate nothing from Postgres, raise nothing and wait for
//! nothing; latches are set after its release.

pub mod batch;
mod callbacks;
pub mod cancel;
pub mod check;
pub mod claim;
pub mod close;
pub mod enqueue;
pub mod external;
mod key_check;
pub mod keys;
mod layout;
mod ordering;
mod place_check;
pub mod progress;
pub mod replace;
pub mod replay;
pub mod revive;
pub mod seize;
mod session;
pub mod wait;

use std::sync::OnceLock;

use crate::domain::dispatcher::{Dispatcher, Wakes};
use crate::domain::entities::{Database, Db, Phase};
use crate::error::{Error, SqlState};
use crate::pg::{catalog, guc, latch, lwlock, registry, shmem};
use crate::supervisor;

pub use callbacks::{install, probe_doubts, runtime_gone};
pub use layout::{Capacities, Layout};
pub use session::{
    attach, begin_write, capacity, confirm, end_write, is_waiting, leave_wait, log_act,
    log_written, reserve_log, set_waiting, with_log, with_open,
};

/// The number of the dispatcher lock in the tranche.
pub const LOCK: usize = registry::LOCK + 1;

struct Place {
    layout: Layout,
    /// Of the dispatcher's part in the block.
    offset: usize,
}

static PLACE: OnceLock<Place> = OnceLock::new();

/// As the settings say.
pub fn capacities() -> Capacities {
    Capacities {
        databases: guc::max_databases(),
        lanes: guc::max_lanes(),
        chunks: guc::max_chunks(),
        open_claims: guc::max_open_claims(),
        runtimes: guc::max_runtimes(),
        timers: guc::max_timers(),
        // A prepared transaction may hold many acts; without prepared transactions doubts
        // come from rebuilds alone.
        doubts: 16_384,
        procs: latch::max_procs(),
    }
}

/// Says where the dispatcher lies; once, while the server starts.
pub fn plan(capacities: Capacities, offset: usize) -> usize {
    let layout = Layout::new(capacities);
    let size = layout.size;
    // A second plan cannot come: settings of a running server do not change.
    let _ = PLACE.set(Place { layout, offset });
    size
}

fn place() -> Option<(&'static Layout, *mut u8)> {
    let Place { layout, offset } = PLACE.get()?;
    let base = shmem::base()?;
    // SAFETY: the block was requested with room for this part.
    Some((layout, unsafe { base.as_ptr().add(*offset) }))
}

/// Lays out the zeroed block, at start and after a crash of a backend.
///
/// # Safety
/// Only for `shmem::attach`: the block has the size that was asked for, is zeroed, and
/// nobody else looks at it yet.
pub unsafe fn format(block: *mut u8, _size: usize) {
    let Some(Place { layout, offset }) = PLACE.get() else { return };
    let mut wakes = Wakes::new();
    // SAFETY: the caller vouches.
    unsafe { layout.view(block.add(*offset), &mut wakes) }.format();
}

/// Runs `body` under the dispatcher lock, then wakes whom it wants woken.
///
/// `body` must be short and must neither call Postgres nor panic; should it panic all
/// the same, every database is replayed, since what it left behind is unknown.
pub fn with<R>(body: impl FnOnce(&mut Dispatcher<'_>) -> R) -> R {
    let Some((layout, base)) = place() else {
        // Every way in has checked that shared memory is there.
        panic!("the dispatcher has no shared memory");
    };
    let mut wakes = Wakes::new();
    let result = {
        let _guard = lwlock::acquire(LOCK).on_poison(suspect_all);
        // SAFETY: the lock is held exclusively for as long as the view lives.
        let mut dispatcher = unsafe { layout.view(base, &mut wakes) };
        body(&mut dispatcher)
    };
    for proc in wakes.as_slice() {
        latch::set_latch_of(*proc);
    }
    result
}

/// What the dispatcher wants to hear about the life of databases.
pub fn callbacks() -> supervisor::Callbacks {
    supervisor::Callbacks {
        on_drop_database: |database| forget(|d| d.oid == database),
        on_drop_extension: |database, extension| {
            forget(|d| d.oid == database && d.extension == extension);
        },
        on_extension: |database, extension| {
            forget(|d| d.oid == database && Some(d.extension) != extension);
        },
        on_databases: |databases| forget(|d| !databases.contains(&d.oid)),
        after_commit_prepared: |_committed| {
            probe_doubts();
            forget_settings();
        },
    }
}

/// A prepared transaction may have changed settings before memory was rebuilt: they are read
/// again when they are needed.
fn forget_settings() {
    with(|d| {
        let mut from = 0;
        while let Some(at) = d.queues.next_used(from) {
            from = at + 1;
            d.queues[at].loaded = false;
            d.queues[at].version = d.queues[at].version.wrapping_add(1);
        }
    });
}

/// Frees the memory of databases that are gone.
fn forget(is_gone: impl Fn(&Database) -> bool) {
    if place().is_none() {
        return;
    }
    with(|d| {
        for db in 0..d.databases.len() {
            if d.databases[db].phase != Phase::Absent && is_gone(&d.databases[db]) {
                d.detach(db as Db);
            }
        }
    });
}

/// A guard was lost to a panic: what it protected may be half-written.
fn suspect_all(_lock: usize) {
    let Some((layout, base)) = place() else { return };
    let mut wakes = Wakes::new();
    // SAFETY: the lock is still held; the view of the panicking frame is not used again.
    let dispatcher = unsafe { layout.view(base, &mut wakes) };
    for database in dispatcher.databases.iter_mut() {
        if database.phase != Phase::Absent {
            database.phase = Phase::Suspect;
            database.replay_due = true;
        }
    }
}

/// AW003: memory does not equal the tables yet.
pub fn replaying() -> Error {
    Error::new(SqlState::REPLAYING, "the dispatcher is still replaying")
        .detail("Memory is rebuilt from the tables after a start of the server.")
        .hint("Try again in a moment. If this lasts, see whether the awa worker of this database runs.")
}

/// A database of the dispatcher, by its slot.
pub type Slot = Db;

/// The name of a queue in memory; empty for one that is not there any more.
pub fn queue_name(queue: u32) -> String {
    let name = with(|d| d.queues.get(queue).map(|q| q.copy_name()));
    name.map_or_else(String::new, |name| name.as_str().to_owned())
}

/// The deadline of an open attempt, if memory is there to tell; MAX: none.
pub fn deadline_of(receipt: i64) -> Option<i64> {
    let (oid, extension) = catalog::identity().ok()?;
    with(|d| {
        let db = d.database(oid, extension)?;
        d.item(db, receipt).map(|at| d.items[at].deadline)
    })
}

/// Whether memory of this database equals its tables.
pub fn is_open(db: Db) -> bool {
    with(|d| d.base(db).phase == Phase::Open)
}

/// Whether nothing says that memory may not equal the tables.
pub fn is_trusted(db: Db) -> bool {
    with(|d| d.base(db).phase == Phase::Open && !d.base(db).replay_due)
}

/// Which rebuild of memory this is; see `confirm`.
pub fn generation(db: Db) -> u64 {
    with(|d| d.base(db).generation)
}
