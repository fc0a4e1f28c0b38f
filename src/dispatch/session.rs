//! What a backend knows about its own transaction, and its way to the dispatcher.

use std::cell::{Cell, RefCell};

use crate::domain::dispatcher::{Dispatcher, Full};
use crate::domain::entities::{Db, Phase};
use crate::domain::undo::{Act, UndoLog};
use crate::error::{Error, Result, SqlState};
use crate::pg::{catalog, latch, xact};
use crate::store;

/// How long a claim or a close waits for the end of a replay, microseconds.
const PATIENCE: i64 = 5_000_000;

thread_local! {
    static INSTALLED: Cell<bool> = const { Cell::new(false) };
    static LOG: RefCell<UndoLog> = const { RefCell::new(UndoLog::new()) };
}

/// Runs `body` on the undo log of this transaction. No Postgres call inside: a FATAL
/// there would run our callbacks, which need the log, on top of the borrow.
pub fn with_log<R>(body: impl FnOnce(&mut UndoLog) -> R) -> R {
    LOG.with_borrow_mut(body)
}

/// Makes room for `count` acts, and arms the callbacks that settle them.
pub fn reserve_log(count: usize) -> Result<()> {
    xact::arm();
    if with_log(|log| log.reserve(count)) {
        Ok(())
    } else {
        Err(Error::new(SqlState(*b"53200"), "out of memory")
            .detail("The undo log of this transaction cannot grow any further."))
    }
}

/// Notes an act for which `reserve_log` made room, under the dispatcher lock.
pub fn log_act(dispatcher: &mut Dispatcher<'_>, db: Db, subxact: u32, act: Act) {
    with_log(|log| dispatcher.note(db, subxact, act, log));
}

/// AW004 that names the setting.
pub fn capacity(full: Full) -> Error {
    Error::new(SqlState::CAPACITY, "a capacity of the dispatcher is used up")
        .detail(format!("The limit is \"{}\".", full.setting()))
        .hint("Raise the setting and restart the server, or let running work finish first.")
}

/// The slot of this database; begins to serve it if this is the first use since the
/// server started. Producing needs no more than this.
pub fn attach() -> Result<Db> {
    let (oid, extension) = identity()?;
    if let Some(db) = super::with(|d| d.database(oid, extension)) {
        return Ok(db);
    }
    let (segments, current) = store::segments::read_states()?;
    let block = store::chunks::fresh_block()?;
    let now = xact::micros();
    super::with(|d| d.attach(oid, extension, block, &segments, current, now)).map_err(capacity)
}

/// What names this database, once the callbacks are there.
fn identity() -> Result<(u32, u32)> {
    if !INSTALLED.replace(true) {
        super::install();
    }
    catalog::identity()
}

/// The slot of this database once memory equals the tables: waits up to five seconds
/// for a replay, then AW003.
pub fn with_open<R>(mut body: impl FnMut(&mut Dispatcher<'_>, Db) -> R) -> Result<R> {
    let (oid, extension) = identity()?;
    let mut until = None;
    loop {
        // One section for both: where many wait for the lock, each section counts.
        let done = super::with(|d| {
            let db = d.database(oid, extension)?;
            (d.databases[usize::from(db)].phase == Phase::Open).then(|| body(d, db))
        });
        if let Some(result) = done {
            return Ok(result);
        }
        attach()?;
        let now = xact::micros();
        if now >= *until.get_or_insert(now + PATIENCE) {
            return Err(super::replaying());
        }
        latch::wait(10);
    }
}

/// To be called after the rows of an act were written: were memory rebuilt in between, the
/// replay may have read the leaf before the rows were there.
pub fn confirm(db: Db, generation: u64) -> Result<()> {
    if super::generation(db) == generation {
        return Ok(());
    }
    Err(super::replaying())
}

thread_local! {
    static WRITING: Cell<Option<(Db, u64)>> = const { Cell::new(None) };
}

/// To be called before a producer gets its places: a rebuild that begins now waits for
/// `end_write`, so that replay does not pass by rows that are still to come.
pub fn begin_write(db: Db) -> Result<()> {
    // Its last call may leave a note.
    reserve_log(1)?;
    if WRITING.get().is_none() {
        let generation = super::with(|d| d.begin_write(db));
        WRITING.set(Some((db, generation)));
    }
    Ok(())
}

/// Notes what was done to rows since `begin_write`. A rebuild that began meanwhile waits for
/// them and holds it as a doubt, so the act is of the generation in which they were begun.
pub fn log_written(dispatcher: &mut Dispatcher<'_>, db: Db, subxact: u32, act: Act) {
    let begun = WRITING.get().filter(|(of, _)| *of == db).map(|(_, generation)| generation);
    let generation = begun.unwrap_or(dispatcher.base(db).generation);
    with_log(|log| dispatcher.note_since(db, generation, subxact, act, log));
}

/// The rows are written. Producing does not fail over a rebuild: in the worst case, another
/// one follows the commit.
pub fn end_write() {
    let Some((db, generation)) = WRITING.take() else { return };
    let subxact = xact::current_subxact();
    super::with(|d| {
        if !d.end_write(db, generation) {
            log_act(d, db, subxact, Act::Foreign);
        }
    });
}

/// A statement failed: its rows do not count.
pub(super) fn abandon_write() {
    if let Some((db, generation)) = WRITING.take() {
        super::with(|d| {
            let _awaited = d.end_write(db, generation);
        });
    }
}

thread_local! {
    static PREPARED: Cell<Option<(u32, u32)>> = const { Cell::new(None) };
}

/// The xid under which PRE_PREPARE left this transaction's acts to doubt, and from which
/// doubt on.
pub(super) fn prepared() -> Option<(u32, u32)> {
    PREPARED.get()
}

pub(super) fn set_prepared(doubts: Option<(u32, u32)>) {
    PREPARED.set(doubts);
}

thread_local! {
    static WAITING: Cell<bool> = const { Cell::new(false) };
}

pub fn is_waiting() -> bool {
    WAITING.get()
}

pub fn set_waiting(waiting: bool) {
    WAITING.set(waiting);
}

/// The wait of this backend ends without a job, however it ends.
pub fn leave_wait() {
    if !WAITING.replace(false) {
        return;
    }
    let proc = latch::my_proc_number();
    super::with(|d| d.abandon_wait(proc));
}
