//! Failed and cancelled jobs, whole, for their retention.

use crate::error::{Error, Result};
use crate::pg::catalog;
use crate::pg::datum::{Datum, Timestamp, ToDatum};
use crate::pg::heap::{Row, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::xact;

use super::body::Body;
use super::job_table::{self, JobTable};

#[derive(Clone, Debug)]
pub struct Done {
    pub job_id: i64,
    /// Else cancelled.
    pub failed: bool,
    pub finalized_at: i64,
    pub attempted_at: Option<i64>,
    pub last_receipt: Option<i64>,
    pub queue: String,
    pub priority: u8,
    pub shard: u8,
    pub run_at: i64,
    /// Its `attempts` are those used in all.
    pub body: Body,
}

impl Done {
    fn state(&self) -> Result<Datum> {
        catalog::job_state(if self.failed { "failed" } else { "cancelled" })
    }

    /// Asks of a row, before it is read, for its queue and when it came to its end.
    pub(super) fn says(row: &Row, is_it: impl Fn(&str, i64) -> bool) -> bool {
        is_it(&row.text(6).unwrap_or_default(), row.micros(3).unwrap_or(0))
    }

    /// A row of `done_entries`, or of `dlq_entries` or `completed_entries`, which have the same
    /// columns but for the second one.
    pub(super) fn to_row(&self, second: Option<Datum>) -> [Option<Datum>; 22] {
        let b = &self.body;
        let [kind, args, metadata, tags, key, states, ordering, concurrency, deadline, history] =
            b.tail();
        [
            Some(self.job_id.to_datum()),
            second,
            Some(Timestamp(self.finalized_at).to_datum()),
            self.attempted_at.map(|at| Timestamp(at).to_datum()),
            self.last_receipt.map(|r| r.to_datum()),
            Some(self.queue.as_str().to_datum()),
            Some(i16::from(self.priority).to_datum()),
            Some(i16::from(self.shard).to_datum()),
            Some(Timestamp(b.created_at).to_datum()),
            Some(Timestamp(self.run_at).to_datum()),
            Some(b.attempts.to_datum()),
            Some(b.max_attempts.to_datum()),
            kind,
            args,
            metadata,
            tags,
            key,
            states,
            ordering,
            concurrency,
            deadline,
            history,
        ]
    }

    fn from_row(row: &Row) -> Result<Self> {
        Self::read(row, row.enum_label(2).as_deref() == Some("failed"))
    }

    /// See `to_row`.
    pub(super) fn read(row: &Row, failed: bool) -> Result<Self> {
        let missing = || Error::internal("a row of a job that came to its end lacks a value");
        Ok(Self {
            job_id: row.i64(1).ok_or_else(missing)?,
            failed,
            finalized_at: row.micros(3).ok_or_else(missing)?,
            attempted_at: row.micros(4),
            last_receipt: row.i64(5),
            queue: row.text(6).ok_or_else(missing)?,
            priority: row.i16(7).ok_or_else(missing)? as u8,
            shard: row.i16(8).ok_or_else(missing)? as u8,
            run_at: row.micros(10).ok_or_else(missing)?,
            body: Body {
                created_at: row.micros(9).ok_or_else(missing)?,
                run_at: row.micros(10),
                expires_at: None,
                attempts: row.i16(11).ok_or_else(missing)?,
                max_attempts: row.i16(12).ok_or_else(missing)?,
                kind: row.copied_varlena(13).ok_or_else(missing)?,
                args: row.copied_varlena(14).ok_or_else(missing)?,
                metadata: row.copied_varlena(15),
                tags: row.copied_varlena(16),
                unique_key: row.copied_varlena(17),
                unique_states: row.copied_varlena(18),
                ordering_key: row.copied_varlena(19),
                concurrency_key: row.copied_varlena(20),
                attempt_deadline: row.interval(21).map(|i| i.to_datum()),
                history: row.copied_varlena(22),
            },
        })
    }
}

pub fn write(jobs: &[Done]) -> Result<()> {
    let table = Table::open(catalog::relation("done_entries")?, LockMode::RowExclusive);
    for job in jobs {
        table.insert(&job.to_row(Some(job.state()?)))?;
    }
    table.close_keep_lock();
    Ok(())
}

const TABLE: JobTable = JobTable { name: "done_entries", key: "done_entries_pkey" };

/// Up to `limit` of the jobs that came to their end until then, oldest first.
///
/// * `is_it` - of its queue and when it came to its end
pub fn read_until(
    until: i64,
    limit: usize,
    is_it: impl Fn(&str, i64) -> bool,
) -> Result<Vec<Done>> {
    let index = "done_entries_finalized_at";
    TABLE.read_until(index, until, limit, |row| Done::says(row, &is_it), Done::from_row)
}

const DELETE: &str = "
DELETE FROM awa.done_entries WHERE job_id OPERATOR(pg_catalog.=) ANY ($1) RETURNING job_id";

/// Takes jobs out that are there, and tells which: another transaction may have been faster.
pub fn delete(job_ids: &[i64]) -> Result<Vec<i64>> {
    let gone = job_table::delete(DELETE, job_ids)?;
    xact::ensure_seen(gone.len() == job_ids.len())?;
    Ok(gone)
}

const TAKE: &str = "
DELETE FROM awa.done_entries WHERE job_id OPERATOR(pg_catalog.=) ANY (ARRAY(
    SELECT job_id FROM awa.done_entries WHERE job_id OPERATOR(pg_catalog.=) ANY ($1)
    FOR UPDATE SKIP LOCKED))
RETURNING job_id";

/// As `delete`, but waits for nobody.
pub fn take(job_ids: &[i64]) -> Result<Vec<i64>> {
    job_table::delete(TAKE, job_ids)
}

pub fn find(job_id: i64, snapshot: Snapshot) -> Result<Option<Done>> {
    TABLE.find(job_id, snapshot, Done::from_row)
}

pub fn read_all(snapshot: Snapshot, take: impl FnMut(Done) -> Result<bool>) -> Result<()> {
    TABLE.read_all(snapshot, Done::from_row, take)
}
