//! Jobs that wait for their time on disk: scheduled ones, and long backoffs.

use crate::domain::entities::Counts;
use crate::error::{Error, Result};
use crate::pg::catalog;
use crate::pg::datum::{Datum, Timestamp, ToDatum};
use crate::pg::heap::{Fate, Row, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::spi;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::body::Body;
use super::job_table::{self, JobTable};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Scheduled,
    Retryable,
}

impl Kind {
    pub fn label(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Retryable => "retryable",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Deferred {
    pub job_id: i64,
    pub kind: Kind,
    pub run_at: i64,
    pub queue: String,
    pub priority: u8,
    pub shard: u8,
    pub body: Body,
}

impl Deferred {
    fn to_row(&self) -> Result<[Option<Datum>; 20]> {
        let b = &self.body;
        let [kind, args, metadata, tags, key, states, ordering, concurrency, deadline, history] =
            b.tail();
        Ok([
            Some(self.job_id.to_datum()),
            Some(catalog::job_state(self.kind.label())?),
            Some(Timestamp(self.run_at).to_datum()),
            Some(self.queue.as_str().to_datum()),
            Some(i16::from(self.priority).to_datum()),
            Some(i16::from(self.shard).to_datum()),
            Some(Timestamp(b.created_at).to_datum()),
            b.expires_at.map(|at| Timestamp(at).to_datum()),
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
        ])
    }

    fn from_row(row: &Row) -> Result<Self> {
        let missing = || Error::internal("a row of deferred_jobs lacks a value");
        let kind = match row.enum_label(2).as_deref() {
            Some("retryable") => Kind::Retryable,
            _ => Kind::Scheduled,
        };
        Ok(Self {
            job_id: row.i64(1).ok_or_else(missing)?,
            kind,
            run_at: row.micros(3).ok_or_else(missing)?,
            queue: row.text(4).ok_or_else(missing)?,
            priority: row.i16(5).ok_or_else(missing)? as u8,
            shard: row.i16(6).ok_or_else(missing)? as u8,
            body: Body {
                created_at: row.micros(7).ok_or_else(missing)?,
                run_at: None,
                expires_at: row.micros(8),
                attempts: row.i16(9).ok_or_else(missing)?,
                max_attempts: row.i16(10).ok_or_else(missing)?,
                kind: row.copied_varlena(11).ok_or_else(missing)?,
                args: row.copied_varlena(12).ok_or_else(missing)?,
                metadata: row.copied_varlena(13),
                tags: row.copied_varlena(14),
                unique_key: row.copied_varlena(15),
                unique_states: row.copied_varlena(16),
                ordering_key: row.copied_varlena(17),
                concurrency_key: row.copied_varlena(18),
                attempt_deadline: row.interval(19).map(|i| i.to_datum()),
                history: row.copied_varlena(20),
            },
        })
    }
}

/// Puts jobs aside.
pub fn write(jobs: &[Deferred]) -> Result<()> {
    let table = Table::open(catalog::relation("deferred_jobs")?, LockMode::RowExclusive);
    let rows = jobs.iter().map(Deferred::to_row).collect::<Result<Vec<_>>>()?;
    if let [row] = rows.as_slice() {
        table.insert(row)?;
    } else {
        table.insert_many(rows.iter().map(|row| &row[..]))?;
    }
    table.close_keep_lock();
    Ok(())
}

/// Jobs whose time has come.
#[derive(Default)]
pub struct Due {
    pub jobs: Vec<Deferred>,
    /// The earliest `run_at` of those left out, since open transactions of others have deleted
    /// them.
    pub held: Option<i64>,
}

/// Up to `limit` jobs that are due, by time.
///
/// * `from` - none that is due was due before
pub fn read_due(from: i64, now: i64, limit: usize) -> Result<Due> {
    let mut due = Due::default();
    let table = Table::open(catalog::relation("deferred_jobs")?, LockMode::AccessShare);
    let index = catalog::relation("deferred_jobs_run_at")?;
    table.index_range(index, from, now, Snapshot::SelfNow, |row| {
        if row.is_held() {
            due.held = due.held.or(row.micros(3));
        } else {
            due.jobs.push(Deferred::from_row(row)?);
        }
        Ok(due.jobs.len() < limit)
    })?;
    table.close_release_lock();
    Ok(due)
}

/// When the next job is due that nobody holds; None: none waits.
///
/// * `from` - none was due before
pub fn next_run_at(from: i64) -> Result<Option<i64>> {
    let mut next = None;
    let table = Table::open(catalog::relation("deferred_jobs")?, LockMode::AccessShare);
    let index = catalog::relation("deferred_jobs_run_at")?;
    table.index_range(index, from, i64::MAX, Snapshot::SelfNow, |row| {
        if row.is_held() {
            return Ok(true);
        }
        next = row.micros(3);
        Ok(false)
    })?;
    table.close_release_lock();
    Ok(next)
}

const DELETE: &str = "
DELETE FROM awa.deferred_jobs WHERE job_id OPERATOR(pg_catalog.=) $1";

/// Takes a job out; false when another transaction was faster, whose end is waited for.
pub fn delete(job_id: i64) -> Result<bool> {
    Ok(spi::as_owner(|spi| spi.execute(DELETE, &[spi::Arg::of(job_id)]))? > 0)
}

const TAKE: &str = "
DELETE FROM awa.deferred_jobs WHERE job_id OPERATOR(pg_catalog.=) ANY (ARRAY(
    SELECT job_id FROM awa.deferred_jobs WHERE job_id OPERATOR(pg_catalog.=) ANY ($1)
    FOR UPDATE SKIP LOCKED))
RETURNING job_id";

/// Takes out those that nobody else is taking out, and tells which: maintenance waits for
/// no client.
pub fn take(job_ids: &[i64]) -> Result<Vec<i64>> {
    job_table::delete(TAKE, job_ids)
}

const TABLE: JobTable = JobTable { name: "deferred_jobs", key: "deferred_jobs_pkey" };

/// One job by its id.
pub fn find(job_id: i64, snapshot: Snapshot) -> Result<Option<Deferred>> {
    TABLE.find(job_id, snapshot, Deferred::from_row)
}

/// Every deferred job a snapshot sees.
pub fn read_all(snapshot: Snapshot, take: impl FnMut(Deferred) -> Result<bool>) -> Result<()> {
    TABLE.read_all(snapshot, Deferred::from_row, take)
}

/// A change to `deferred_jobs` of a transaction whose end is open.
pub struct Pending {
    pub xid: u32,
    pub queue: String,
    pub kind: Kind,
    pub run_at: i64,
    /// Rows written, or less than zero: rows deleted.
    pub change: i32,
}

/// How many jobs each queue has put aside, and what open transactions will change about it.
///
/// * `below` - jobs with this id and after are left out
pub fn count_all(below: i64) -> Result<(HashMap<String, Counts>, Vec<Pending>)> {
    let mut counts: HashMap<String, Counts> = HashMap::new();
    let mut pending = Vec::new();
    let table = Table::open(catalog::relation("deferred_jobs")?, LockMode::AccessShare);
    table.scan(Snapshot::Any, |row| {
        // Asked once: the deleter may commit while we look.
        let deleter = row.deleter();
        let is_deleted = deleter == Some(Fate::Committed);
        if row.i64(1).is_none_or(|id| id >= below) || is_deleted {
            return Ok(true);
        }
        let queue = row.text(4).unwrap_or_default();
        let kind = match row.enum_label(2).as_deref() {
            Some("retryable") => Kind::Retryable,
            _ => Kind::Scheduled,
        };
        let run_at = row.micros(3).unwrap_or(i64::MAX);
        match row.fate() {
            Fate::Aborted => return Ok(true),
            Fate::InProgress(xid) => {
                pending.push(Pending { xid, queue: queue.clone(), kind, run_at, change: 1 });
            }
            Fate::Committed => {
                let entry = counts.entry(queue.clone()).or_default();
                match kind {
                    Kind::Scheduled => entry.scheduled += 1,
                    Kind::Retryable => entry.retryable += 1,
                }
            }
        }
        if let Some(Fate::InProgress(xid)) = deleter {
            pending.push(Pending { xid, queue, kind, run_at, change: -1 });
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok((counts, merge(pending)))
}

/// One change for all rows that a transaction wrote, or deleted, for a queue.
fn merge(rows: Vec<Pending>) -> Vec<Pending> {
    let mut merged: HashMap<(u32, String, bool, i32), Pending> = HashMap::new();
    for row in rows {
        let retryable = row.kind == Kind::Retryable;
        let key = (row.xid, row.queue.clone(), retryable, row.change.signum());
        match merged.entry(key) {
            Entry::Occupied(mut entry) => {
                let sum = entry.get_mut();
                sum.change += row.change;
                sum.run_at = sum.run_at.min(row.run_at);
            }
            Entry::Vacant(entry) => {
                entry.insert(row);
            }
        }
    }
    merged.into_values().collect()
}

/// How many jobs each queue has put aside, as a snapshot sees it.
pub fn count(snapshot: Snapshot) -> Result<HashMap<String, Counts>> {
    let mut counts: HashMap<String, Counts> = HashMap::new();
    let table = Table::open(catalog::relation("deferred_jobs")?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        let entry = counts.entry(row.text(4).unwrap_or_default()).or_default();
        match row.enum_label(2).as_deref() {
            Some("retryable") => entry.retryable += 1,
            _ => entry.scheduled += 1,
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(counts)
}
