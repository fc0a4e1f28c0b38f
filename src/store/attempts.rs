//! What is kept about an open attempt beside its claim: its progress, its callback, and that
//! it was asked to stop.
//!
//! Who writes or deletes a row has taken the attempt, so nobody else does it meanwhile; rows
//! are found whatever the isolation level of the transaction.

use std::collections::HashMap;

use crate::domain::entities::{Care, Mark};
use crate::error::Result;
use crate::pg::catalog;
use crate::pg::datum::{Datum, Timestamp, ToDatum, Uuid};
use crate::pg::heap::{Fate, Row, Table, Tid};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::xact;

mod column {
    pub const JOB_ID: i16 = 1;
    pub const RECEIPT: i16 = 2;
    pub const PROGRESS: i16 = 3;
    pub const CALLBACK_ID: i16 = 4;
    pub const CALLBACK_TIMEOUT_AT: i16 = 5;
    pub const CALLBACK_RESULT: i16 = 6;
    pub const PARKED: i16 = 7;
    pub const CANCEL_REQUESTED_AT: i16 = 9;
    pub const CANCEL_REASON: i16 = 10;
    pub const RESUMED: i16 = 11;
    pub const LEASED: i16 = 12;
    pub const COUNT: usize = 12;
}

/// A row, to be written anew with changes.
#[derive(Clone, Debug, Default)]
pub struct Note {
    tid: Option<Tid>,
    pub progress: Option<Datum>,
    /// None: there is none, or it is resolved.
    pub callback_id: Option<Uuid>,
    pub callback_timeout_at: Option<i64>,
    /// What the last one brought that was resumed.
    pub callback_result: Option<Datum>,
    pub parked: bool,
    cancel_requested_at: Option<i64>,
    pub cancel_reason: Option<String>,
    /// The last callback that was registered was resumed.
    pub resumed: bool,
    /// It was resumed after its owner had gone.
    pub leased: bool,
}

impl Note {
    fn from_row(row: &Row) -> Self {
        Self {
            tid: Some(row.tid()),
            progress: row.copied_varlena(column::PROGRESS),
            callback_id: row.uuid(column::CALLBACK_ID),
            callback_timeout_at: row.micros(column::CALLBACK_TIMEOUT_AT),
            callback_result: row.copied_varlena(column::CALLBACK_RESULT),
            parked: row.bool(column::PARKED).unwrap_or(false),
            cancel_requested_at: row.micros(column::CANCEL_REQUESTED_AT),
            cancel_reason: row.text(column::CANCEL_REASON),
            resumed: row.bool(column::RESUMED).unwrap_or(false),
            leased: row.bool(column::LEASED).unwrap_or(false),
        }
    }

    fn to_row(&self, job_id: i64, receipt: i64) -> [Option<Datum>; column::COUNT] {
        let time = |at: Option<i64>| at.map(|at| Timestamp(at).to_datum());
        [
            Some(job_id.to_datum()),
            Some(receipt.to_datum()),
            self.progress,
            self.callback_id.map(|id| id.to_datum()),
            time(self.callback_timeout_at),
            self.callback_result,
            Some(self.parked.to_datum()),
            Some(Timestamp(xact::micros()).to_datum()),
            time(self.cancel_requested_at),
            self.cancel_reason.as_ref().map(|reason| reason.as_str().to_datum()),
            Some(self.resumed.to_datum()),
            Some(self.leased.to_datum()),
        ]
    }

    /// What memory has to know of it.
    pub fn mark(&self) -> Mark {
        mark(self.cancel_requested_at, (self.parked, self.leased), self.callback_timeout_at)
    }
}

fn mark(asked: Option<i64>, (parked, leased): (bool, bool), timeout: Option<i64>) -> Mark {
    let care = match (parked, leased) {
        (true, _) => Care::Parked,
        (false, true) => Care::Lease,
        (false, false) => Care::Claimer,
    };
    let until = timeout.filter(|_| parked).unwrap_or(0);
    Mark { asked: asked.is_some(), care, until }
}

fn mark_of(row: &Row) -> Mark {
    let flag = |column| row.bool(column).unwrap_or(false);
    mark(
        row.micros(column::CANCEL_REQUESTED_AT),
        (flag(column::PARKED), flag(column::LEASED)),
        row.micros(column::CALLBACK_TIMEOUT_AT),
    )
}

fn open(mode: LockMode) -> Result<(Table, u32)> {
    let table = Table::open(catalog::relation("attempt_state")?, mode);
    Ok((table, catalog::relation("attempt_state_pkey")?))
}

/// The row of an attempt.
fn find<T>(
    (table, index): &(Table, u32),
    (job_id, receipt): (i64, i64),
    snapshot: Snapshot,
    read: impl Fn(&Row) -> T,
) -> Result<Option<T>> {
    let mut found = None;
    table.index_range(*index, job_id, job_id, snapshot, |row| {
        if row.i64(column::RECEIPT) == Some(receipt) {
            found = Some(read(row));
        }
        Ok(found.is_none())
    })?;
    Ok(found)
}

/// What is written about an attempt.
pub fn read(job_id: i64, receipt: i64, snapshot: Snapshot) -> Result<Option<Note>> {
    let table = open(LockMode::AccessShare)?;
    let found = find(&table, (job_id, receipt), snapshot, Note::from_row)?;
    table.0.close_release_lock();
    Ok(found)
}

/// Writes the row of an attempt with a change, and returns it.
pub fn write(job_id: i64, receipt: i64, change: impl FnOnce(&mut Note)) -> Result<Note> {
    let table = open(LockMode::RowExclusive)?;
    let found = find(&table, (job_id, receipt), Snapshot::SelfNow, Note::from_row)?;
    let mut note = found.unwrap_or_default();
    change(&mut note);
    if let Some(tid) = note.tid {
        table.0.delete(tid);
    }
    table.0.insert(&note.to_row(job_id, receipt))?;
    table.0.close_keep_lock();
    Ok(note)
}

/// Writes down that the attempt was asked to stop, unless it is written already.
pub fn ask(job_id: i64, receipt: i64, now: i64, reason: Option<&str>) -> Result<Note> {
    write(job_id, receipt, |note| {
        if note.cancel_requested_at.is_none() {
            note.cancel_requested_at = Some(now);
            note.cancel_reason = reason.map(str::to_owned);
        }
    })
}

/// The attempt ends: its row goes.
pub fn forget(job_id: i64, receipt: i64) -> Result<()> {
    let table = open(LockMode::RowExclusive)?;
    if let Some(tid) = find(&table, (job_id, receipt), Snapshot::SelfNow, Row::tid)? {
        table.0.delete(tid);
    }
    table.0.close_keep_lock();
    Ok(())
}

/// The job and the receipt of the attempt that has this callback.
pub fn of_callback(id: &Uuid) -> Result<Option<(i64, i64)>> {
    let mut found = None;
    let table = Table::open(catalog::relation("attempt_state")?, LockMode::AccessShare);
    let index = catalog::relation("attempt_state_callback_id")?;
    table.index_uuid(index, id, Snapshot::SelfNow, |row| {
        found = row.i64(column::JOB_ID).zip(row.i64(column::RECEIPT));
        Ok(false)
    })?;
    table.close_release_lock();
    Ok(found)
}

/// What is written about all open attempts, by receipt.
pub fn read_all(snapshot: Snapshot) -> Result<HashMap<i64, Note>> {
    let mut found = HashMap::new();
    let table = Table::open(catalog::relation("attempt_state")?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        if let Some(receipt) = row.i64(column::RECEIPT) {
            found.insert(receipt, Note::from_row(row));
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(found)
}

/// Marks of attempts, by receipt.
#[derive(Default)]
pub struct Marks {
    pub committed: HashMap<i64, Mark>,
    /// As they are for the transactions, whose ends are open, that wrote them.
    pub open: HashMap<i64, (u32, Mark)>,
}

/// What a replay wants to know.
pub fn read_marks() -> Result<Marks> {
    let mut marks = Marks::default();
    let table = Table::open(catalog::relation("attempt_state")?, LockMode::AccessShare);
    table.scan(Snapshot::Any, |row| {
        let Some(receipt) = row.i64(column::RECEIPT) else { return Ok(true) };
        match (row.fate(), row.deleter()) {
            (Fate::Aborted, _) | (_, Some(Fate::Committed)) => {}
            (Fate::Committed, _) => {
                marks.committed.insert(receipt, mark_of(row));
            }
            // The same transaction has written it anew since, or closes the attempt.
            (Fate::InProgress(_), Some(Fate::InProgress(_))) => {}
            (Fate::InProgress(xid), _) => {
                marks.open.insert(receipt, (xid, mark_of(row)));
            }
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(marks)
}
