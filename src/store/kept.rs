//! Completed jobs, whole, that their queues keep for longer than their segment is there.

use super::done::Done;
use crate::error::Result;
use crate::pg::catalog;
use crate::pg::datum::Datum;
use crate::pg::heap::{Row, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::{lock, spi};

/// A completed job. The `attempts` of its body are those used, the last one included.
#[derive(Clone, Debug)]
pub struct Kept {
    pub done: Done,
    /// A jsonb.
    pub result: Option<Datum>,
}

impl Kept {
    fn from_row(row: &Row) -> Result<Self> {
        Ok(Self { done: Done::read(row, false)?, result: row.copied_varlena(2) })
    }
}

/// Whether nobody else moves jobs out of the segment until this transaction ends.
pub fn try_hold(segment: u8) -> Result<bool> {
    Ok(lock::try_hold_key(catalog::relation("completed_entries")?, u32::from(segment)))
}

pub fn write(jobs: &[Kept]) -> Result<()> {
    let table = Table::open(catalog::relation("completed_entries")?, LockMode::RowExclusive);
    let rows: Vec<_> = jobs.iter().map(|job| job.done.to_row(job.result)).collect();
    table.insert_many(rows.iter().map(|row| &row[..]))?;
    table.close_keep_lock();
    Ok(())
}

/// Up to `limit` of those that ended until then, oldest first; see `done::read_until`.
pub fn read_until(
    until: i64,
    limit: usize,
    is_it: impl Fn(&str, i64) -> bool,
) -> Result<Vec<Done>> {
    let mut found = Vec::new();
    let table = Table::open(catalog::relation("completed_entries")?, LockMode::AccessShare);
    let index = catalog::relation("completed_entries_finalized_at")?;
    table.index_range(index, i64::MIN, until, Snapshot::SelfNow, |row| {
        let (queue, ended) = (row.text(6).unwrap_or_default(), row.micros(3).unwrap_or(0));
        // What is kept is not copied.
        if !row.is_held() && is_it(&queue, ended) {
            found.push(Kept::from_row(row)?.done);
        }
        Ok(found.len() < limit)
    })?;
    table.close_release_lock();
    Ok(found)
}

const TAKE: &str = "
DELETE FROM awa.completed_entries WHERE job_id OPERATOR(pg_catalog.=) ANY (ARRAY(
    SELECT job_id FROM awa.completed_entries WHERE job_id OPERATOR(pg_catalog.=) ANY ($1)
    FOR UPDATE SKIP LOCKED))
RETURNING job_id";

/// Takes those out that are there, waits for nobody, and tells which.
pub fn take(job_ids: &[i64]) -> Result<Vec<i64>> {
    spi::as_owner(|spi| {
        let rows = spi.query(TAKE, &[spi::Arg::bigint_array(job_ids)])?;
        rows.collect(|row| Ok(row.i64(1).unwrap_or(0)))
    })
}

pub fn find(job_id: i64, snapshot: Snapshot) -> Result<Option<Kept>> {
    let mut found = None;
    let table = Table::open(catalog::relation("completed_entries")?, LockMode::AccessShare);
    let index = catalog::relation("completed_entries_pkey")?;
    table.index_range(index, job_id, job_id, snapshot, |row| {
        found = Some(Kept::from_row(row)?);
        Ok(false)
    })?;
    table.close_release_lock();
    Ok(found)
}

pub fn read_all(snapshot: Snapshot, mut take: impl FnMut(Kept) -> Result<bool>) -> Result<()> {
    let table = Table::open(catalog::relation("completed_entries")?, LockMode::AccessShare);
    table.scan(snapshot, |row| take(Kept::from_row(row)?))?;
    table.close_release_lock();
    Ok(())
}
