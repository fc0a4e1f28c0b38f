//! Completed jobs, whole, that their queues keep for longer than their segment is there.

use super::done::Done;
use super::job_table::{self, JobTable};
use crate::error::Result;
use crate::pg::catalog;
use crate::pg::datum::Datum;
use crate::pg::heap::{Row, Table};
use crate::pg::lock;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;

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

const TABLE: JobTable = JobTable { name: "completed_entries", key: "completed_entries_pkey" };

/// Up to `limit` of those that ended until then, oldest first; see `done::read_until`.
pub fn read_until(
    until: i64,
    limit: usize,
    is_it: impl Fn(&str, i64) -> bool,
) -> Result<Vec<Done>> {
    let index = "completed_entries_finalized_at";
    let read = |row: &Row| Ok(Kept::from_row(row)?.done);
    TABLE.read_until(index, until, limit, |row| Done::says(row, &is_it), read)
}

const TAKE: &str = "
DELETE FROM awa.completed_entries WHERE job_id OPERATOR(pg_catalog.=) ANY (ARRAY(
    SELECT job_id FROM awa.completed_entries WHERE job_id OPERATOR(pg_catalog.=) ANY ($1)
    FOR UPDATE SKIP LOCKED))
RETURNING job_id";

/// Takes those out that are there, waits for nobody, and tells which.
pub fn take(job_ids: &[i64]) -> Result<Vec<i64>> {
    job_table::delete(TAKE, job_ids)
}

pub fn find(job_id: i64, snapshot: Snapshot) -> Result<Option<Kept>> {
    TABLE.find(job_id, snapshot, Kept::from_row)
}

pub fn read_all(snapshot: Snapshot, take: impl FnMut(Kept) -> Result<bool>) -> Result<()> {
    TABLE.read_all(snapshot, Kept::from_row, take)
}
