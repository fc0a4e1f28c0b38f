//! What is kept about an open attempt beside its claim: its progress, and that it was asked
//! to stop.
//!
//! Who writes or deletes a row has the attempt to itself: it has taken it to close it, or has
//! announced its note (see `Item::noter`). Rows are found whatever the isolation level of the
//! transaction.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde_json::Value;

use crate::error::Result;
use crate::pg::catalog;
use crate::pg::datum::{self, Datum, Timestamp, ToDatum};
use crate::pg::heap::{Fate, Row, Table, Tid};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::xact;

mod column {
    pub const RECEIPT: i16 = 2;
    pub const PROGRESS: i16 = 3;
    pub const CALLBACK_ID: i16 = 4;
    pub const CALLBACK_TIMEOUT_AT: i16 = 5;
    pub const CALLBACK_RESULT: i16 = 6;
    pub const PARKED: i16 = 7;
    pub const CANCEL_REQUESTED_AT: i16 = 9;
    pub const CANCEL_REASON: i16 = 10;
    pub const COUNT: usize = 10;
}

/// What was said about an attempt.
#[derive(Debug, Default)]
pub struct Said {
    pub progress: Option<Value>,
    pub cancel_reason: Option<String>,
}

/// A row, to be written anew with changes.
struct Note {
    tid: Option<Tid>,
    progress: Option<Datum>,
    callback_id: Option<Datum>,
    callback_timeout_at: Option<Datum>,
    callback_result: Option<Datum>,
    parked: bool,
    cancel_requested_at: Option<i64>,
    cancel_reason: Option<String>,
}

impl Note {
    fn empty() -> Self {
        Self {
            tid: None,
            progress: None,
            callback_id: None,
            callback_timeout_at: None,
            callback_result: None,
            parked: false,
            cancel_requested_at: None,
            cancel_reason: None,
        }
    }

    fn from_row(row: &Row) -> Self {
        Self {
            tid: Some(row.tid()),
            progress: row.copied_varlena(column::PROGRESS),
            callback_id: row.uuid(column::CALLBACK_ID).map(|id| id.to_datum()),
            callback_timeout_at: row.timestamp(column::CALLBACK_TIMEOUT_AT).map(|t| t.to_datum()),
            callback_result: row.copied_varlena(column::CALLBACK_RESULT),
            parked: row.bool(column::PARKED).unwrap_or(false),
            cancel_requested_at: row.micros(column::CANCEL_REQUESTED_AT),
            cancel_reason: row.text(column::CANCEL_REASON),
        }
    }

    fn to_row(&self, job_id: i64, receipt: i64) -> [Option<Datum>; column::COUNT] {
        [
            Some(job_id.to_datum()),
            Some(receipt.to_datum()),
            self.progress,
            self.callback_id,
            self.callback_timeout_at,
            self.callback_result,
            Some(self.parked.to_datum()),
            Some(Timestamp(xact::micros()).to_datum()),
            self.cancel_requested_at.map(|at| Timestamp(at).to_datum()),
            self.cancel_reason.as_ref().map(|reason| reason.as_str().to_datum()),
        ]
    }
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

/// Writes the row of an attempt with a change.
fn write(job_id: i64, receipt: i64, change: impl FnOnce(&mut Note)) -> Result<()> {
    let table = open(LockMode::RowExclusive)?;
    let found = find(&table, (job_id, receipt), Snapshot::SelfNow, Note::from_row)?;
    let mut note = found.unwrap_or_else(Note::empty);
    change(&mut note);
    if let Some(tid) = note.tid {
        table.0.delete(tid);
    }
    table.0.insert(&note.to_row(job_id, receipt))?;
    table.0.close_keep_lock();
    Ok(())
}

/// Writes down that the attempt was asked to stop, unless it is written already.
pub fn ask(job_id: i64, receipt: i64, now: i64, reason: Option<&str>) -> Result<()> {
    write(job_id, receipt, |note| {
        if note.cancel_requested_at.is_none() {
            note.cancel_requested_at = Some(now);
            note.cancel_reason = reason.map(str::to_owned);
        }
    })
}

/// Writes down how far the attempt has come.
///
/// * `change` - what it is now, from what was said before about this attempt
pub fn set_progress(
    job_id: i64,
    receipt: i64,
    change: impl FnOnce(Option<Value>) -> Value,
) -> Result<()> {
    write(job_id, receipt, |note| {
        let before = note.progress.map(datum::own_json);
        note.progress = Some(change(before).to_datum());
    })
}

/// The progress of an attempt, if it said any.
pub fn progress(job_id: i64, receipt: i64, snapshot: Snapshot) -> Result<Option<Datum>> {
    let table = open(LockMode::AccessShare)?;
    let read = |row: &Row| row.copied_varlena(column::PROGRESS);
    let found = find(&table, (job_id, receipt), snapshot, read)?;
    table.0.close_release_lock();
    Ok(found.flatten())
}

/// The progress of all attempts that said any, by receipt.
pub fn all_progress(snapshot: Snapshot) -> Result<HashMap<i64, Datum>> {
    let mut found = HashMap::new();
    let table = Table::open(catalog::relation("attempt_state")?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        let entry = row.i64(column::RECEIPT).zip(row.copied_varlena(column::PROGRESS));
        found.extend(entry);
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(found)
}

/// The attempt ends: its row goes. None: an open transaction has written it, and is not
/// waited for. That is rare: those who write are announced, but a rebuild forgets them.
///
/// * `may_wait` - for the end of an open transaction
pub fn forget(job_id: i64, receipt: i64, may_wait: bool) -> Result<Option<Said>> {
    let table = open(LockMode::RowExclusive)?;
    while let Some(xid) = writer(&table, job_id, receipt)? {
        if !may_wait {
            table.0.close_keep_lock();
            return Ok(None);
        }
        xact::wait_for_xid(xid);
    }
    let read = |row: &Row| {
        let progress = row.json(column::PROGRESS);
        (row.tid(), Said { progress, cancel_reason: row.text(column::CANCEL_REASON) })
    };
    let found = find(&table, (job_id, receipt), Snapshot::SelfNow, read)?;
    let said = found.map(|(tid, said)| {
        table.0.delete(tid);
        said
    });
    table.0.close_keep_lock();
    Ok(Some(said.unwrap_or_default()))
}

/// An open transaction of somebody else that has written the row of an attempt.
fn writer((table, index): &(Table, u32), job_id: i64, receipt: i64) -> Result<Option<u32>> {
    let mut writer = None;
    table.index_range(*index, job_id, job_id, Snapshot::Any, |row| {
        if row.i64(column::RECEIPT) == Some(receipt) {
            for fate in [Some(row.fate()), row.deleter()].into_iter().flatten() {
                if let Fate::InProgress(xid) = fate
                    && !xact::is_current(xid)
                {
                    writer = Some(xid);
                }
            }
        }
        Ok(writer.is_none())
    })?;
    Ok(writer)
}

/// The attempts that were asked to stop, by receipt; Some: by a transaction whose end is
/// open.
pub fn asked() -> Result<HashMap<i64, Option<u32>>> {
    let mut asked: HashMap<i64, Option<u32>> = HashMap::new();
    let table = Table::open(catalog::relation("attempt_state")?, LockMode::AccessShare);
    table.scan(Snapshot::Any, |row| {
        if row.is_deleted() || row.is_null(column::CANCEL_REQUESTED_AT) {
            return Ok(true);
        }
        let Some(receipt) = row.i64(column::RECEIPT) else { return Ok(true) };
        let asker = match row.fate() {
            Fate::Committed => None,
            Fate::InProgress(xid) => Some(xid),
            Fate::Aborted => return Ok(true),
        };
        match asked.entry(receipt) {
            // A row that is written anew says what the one before it says.
            Entry::Occupied(mut entry) if asker.is_none() => {
                entry.insert(None);
            }
            Entry::Occupied(_) => {}
            Entry::Vacant(entry) => {
                entry.insert(asker);
            }
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(asked)
}
