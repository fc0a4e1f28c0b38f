//! What is kept about an open attempt beside its claim: that it was asked to stop.
//!
//! Who writes or deletes a row has taken the attempt to close it, so nobody else does it
//! meanwhile; rows are found whatever the isolation level of the transaction.

use std::collections::HashMap;

use crate::error::Result;
use crate::pg::catalog;
use crate::pg::datum::{Timestamp, ToDatum};
use crate::pg::heap::{Fate, Row, Table, Tid};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;

mod column {
    pub const RECEIPT: i16 = 2;
    pub const CANCEL_REQUESTED_AT: i16 = 9;
    pub const CANCEL_REASON: i16 = 10;
}

fn open(mode: LockMode) -> Result<(Table, u32)> {
    let table = Table::open(catalog::relation("attempt_state")?, mode);
    Ok((table, catalog::relation("attempt_state_pkey")?))
}

/// The row of an attempt.
fn find<T>(
    (table, index): &(Table, u32),
    job_id: i64,
    receipt: i64,
    read: impl Fn(&Row) -> T,
) -> Result<Option<(Tid, T)>> {
    let mut found = None;
    table.index_range(*index, job_id, job_id, Snapshot::SelfNow, |row| {
        if row.i64(column::RECEIPT) == Some(receipt) {
            found = Some((row.tid(), read(row)));
        }
        Ok(found.is_none())
    })?;
    Ok(found)
}

/// Writes down that the attempt was asked to stop, unless it is written already.
pub fn ask(job_id: i64, receipt: i64, now: i64, reason: Option<&str>) -> Result<()> {
    let table = open(LockMode::RowExclusive)?;
    if find(&table, job_id, receipt, |_| ())?.is_none() {
        table.0.insert(&[
            Some(job_id.to_datum()),
            Some(receipt.to_datum()),
            None,
            None,
            None,
            None,
            Some(false.to_datum()),
            Some(Timestamp(now).to_datum()),
            Some(Timestamp(now).to_datum()),
            reason.map(|reason| reason.to_datum()),
        ])?;
    }
    table.0.close_keep_lock();
    Ok(())
}

/// The attempt ends: its row goes. Returns why it was asked to stop, if a reason was given.
pub fn forget(job_id: i64, receipt: i64) -> Result<Option<String>> {
    let table = open(LockMode::RowExclusive)?;
    let found = find(&table, job_id, receipt, |row| row.text(column::CANCEL_REASON))?;
    let reason = found.and_then(|(tid, reason)| {
        table.0.delete(tid);
        reason
    });
    table.0.close_keep_lock();
    Ok(reason)
}

/// The attempts that were asked to stop, by receipt; Some: by a transaction whose end is
/// open.
pub fn asked() -> Result<HashMap<i64, Option<u32>>> {
    let mut asked = HashMap::new();
    let table = Table::open(catalog::relation("attempt_state")?, LockMode::AccessShare);
    table.scan(Snapshot::Any, |row| {
        if row.is_deleted() || row.is_null(column::CANCEL_REQUESTED_AT) {
            return Ok(true);
        }
        let Some(receipt) = row.i64(column::RECEIPT) else { return Ok(true) };
        match row.fate() {
            Fate::Committed => asked.insert(receipt, None),
            Fate::InProgress(xid) => asked.insert(receipt, Some(xid)),
            Fate::Aborted => None,
        };
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(asked)
}
