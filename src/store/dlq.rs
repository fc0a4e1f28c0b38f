//! Dead letters: failed jobs that are kept until somebody decides about them.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::pg::catalog;
use crate::pg::datum::ToDatum;
use crate::pg::heap::{Row, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::spi::{self, Arg};
use crate::pg::xact;

use super::changes::{self, Change};
use super::done::Done;
use super::job_table::JobTable;

/// A failed job, and why it is here. `finalized_at` is when it came.
#[derive(Clone, Debug)]
pub struct Dead {
    pub done: Done,
    pub reason: String,
}

impl Dead {
    fn from_row(row: &Row) -> Result<Self> {
        let reason = row.text(2).ok_or_else(|| Error::internal("a dead letter has no reason"))?;
        Ok(Self { done: Done::read(row, true)?, reason })
    }
}

pub fn write(jobs: &[Dead]) -> Result<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    let table = Table::open(catalog::relation("dlq_entries")?, LockMode::RowExclusive);
    for job in jobs {
        table.insert(&job.done.to_row(Some(job.reason.as_str().to_datum())))?;
    }
    table.close_keep_lock();
    count(jobs.iter().map(|job| job.done.queue.as_str()), 1)
}

/// Notes how many letters of each queue come or go.
fn count<'a>(queues: impl Iterator<Item = &'a str>, sign: i64) -> Result<()> {
    let mut sums: BTreeMap<&str, Change> = BTreeMap::new();
    for queue in queues {
        sums.entry(queue).or_default().letters += sign;
    }
    changes::add(&sums)
}

const MISCOUNTED: &str = "
SELECT coalesce(c.queue, d.queue), coalesce(c.jobs, 0), coalesce(d.jobs, 0)
FROM (SELECT queue, pg_catalog.sum(letters)::pg_catalog.int8 FROM awa.queue_changes GROUP BY queue)
     AS c (queue, jobs)
FULL JOIN (SELECT queue, pg_catalog.count(*) FROM awa.dlq_entries GROUP BY queue)
     AS d (queue, jobs) ON c.queue OPERATOR(pg_catalog.=) d.queue
WHERE coalesce(c.jobs, 0) OPERATOR(pg_catalog.<>) coalesce(d.jobs, 0)";

/// Queues whose counts are not those of their rows, in words.
pub fn miscounted() -> Result<Vec<String>> {
    spi::as_owner(|spi| {
        spi.query(MISCOUNTED, &[])?.collect(|row| {
            let (queue, noted) = (row.text(1).unwrap_or_default(), row.i64(2).unwrap_or(0));
            let rows = row.i64(3).unwrap_or(0);
            Ok(format!("queue \"{queue}\" counts {noted} dead letters and has {rows}"))
        })
    })
}

const DELETE: &str = "
DELETE FROM awa.dlq_entries WHERE job_id OPERATOR(pg_catalog.=) ANY ($1) RETURNING job_id, queue";

const TAKE: &str = "
DELETE FROM awa.dlq_entries WHERE job_id OPERATOR(pg_catalog.=) ANY (ARRAY(
    SELECT job_id FROM awa.dlq_entries WHERE job_id OPERATOR(pg_catalog.=) ANY ($1)
    FOR UPDATE SKIP LOCKED))
RETURNING job_id, queue";

/// As `delete`, but waits for nobody.
pub fn take(job_ids: &[i64]) -> Result<Vec<i64>> {
    delete_with(TAKE, job_ids)
}

/// Takes jobs out that are there, and tells which, sorted: another transaction may have been
/// faster.
pub fn delete(job_ids: &[i64]) -> Result<Vec<i64>> {
    let gone = delete_with(DELETE, job_ids)?;
    xact::ensure_seen(gone.len() == job_ids.len())?;
    Ok(gone)
}

fn delete_with(statement: &'static str, job_ids: &[i64]) -> Result<Vec<i64>> {
    if job_ids.is_empty() {
        return Ok(Vec::new());
    }
    let mut gone = spi::as_owner(|spi| {
        let rows = spi.query(statement, &[Arg::bigint_array(job_ids)])?;
        rows.collect(|row| {
            let id = row.i64(1).ok_or_else(|| Error::internal("a job id is null"))?;
            Ok((id, row.text(2).unwrap_or_default()))
        })
    })?;
    if !gone.is_empty() {
        count(gone.iter().map(|(_, queue)| queue.as_str()), -1)?;
    }
    gone.sort_unstable();
    Ok(gone.into_iter().map(|(id, _)| id).collect())
}

const TABLE: JobTable = JobTable { name: "dlq_entries", key: "dlq_entries_pkey" };

pub fn find(job_id: i64, snapshot: Snapshot) -> Result<Option<Dead>> {
    TABLE.find(job_id, snapshot, Dead::from_row)
}

/// Up to `limit` of those that came until then, oldest first.
pub fn read_until(until: i64, limit: usize) -> Result<Vec<Dead>> {
    TABLE.read_until("dlq_entries_dlq_at", until, limit, |_| true, Dead::from_row)
}

pub fn read_all(snapshot: Snapshot, take: impl FnMut(Dead) -> Result<bool>) -> Result<()> {
    TABLE.read_all(snapshot, Dead::from_row, take)
}
