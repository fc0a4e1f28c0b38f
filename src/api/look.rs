//! list_jobs, job_attempts, dump_job: from the tables alone, so a standby has them too.

use std::collections::BTreeMap;

use serde_json::Value;

use super::access;
use super::jobs::{Gate, find, push, shown_state};
use crate::domain::entities::SEGMENTS;
use crate::error::{Error, Result};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{self, Timestamp, ToDatum};
use crate::pg::snapshot::Snapshot;
use crate::pg::{catalog, spi, xact};
use crate::store::acl::Profile;
use crate::store::jobs::{self, Job};
use crate::store::timeline::{self, Attempt};

sql_function!(awa_list_jobs, list_jobs);
sql_function!(awa_job_attempts, job_attempts);
sql_function!(awa_dump_job, dump_job);

const MAX_ROWS: i32 = 10_000;

/// What the rows of a list have in common.
struct Filter {
    queue: Option<String>,
    state: Option<String>,
    kind: Option<String>,
    tag: Option<String>,
    before_id: i64,
}

impl Filter {
    fn admits(&self, job: &Job, now: i64) -> bool {
        let body = &job.body;
        job.job_id < self.before_id
            && self.queue.as_ref().is_none_or(|queue| *queue == job.queue)
            && self.state.as_ref().is_none_or(|state| state == shown_state(job, now))
            && self.kind.as_ref().is_none_or(|kind| *kind == datum::own_text(body.kind))
            && self.tag.as_ref().is_none_or(|tag| {
                body.tags.is_some_and(|tags| datum::own_texts(tags).iter().any(|t| t == tag))
            })
    }
}

/// The newest ids first.
fn list_jobs(call: &mut Call) -> Result<Returned> {
    let filter = Filter {
        queue: call.text(0),
        state: call.raw(1).and_then(catalog::enum_label),
        kind: call.text(2),
        tag: call.text(3),
        before_id: call.i64(4).unwrap_or(i64::MAX),
    };
    let max_rows = call.i32(5).unwrap_or(100);
    if !(0..=MAX_ROWS).contains(&max_rows) {
        return Err(Error::invalid(format!("max_rows must be between 0 and {MAX_ROWS}")));
    }
    let mut rows = call.rows()?;
    let mut gate = Gate::new()?;
    let now = xact::micros();
    let mut newest: BTreeMap<i64, Job> = BTreeMap::new();
    let mut take = |job: Job| {
        if filter.admits(&job, now) && gate.admits(&job.queue)? {
            newest.insert(job.job_id, job);
            if newest.len() > max_rows as usize {
                newest.pop_first();
            }
        }
        Ok(true)
    };
    for segment in 0..SEGMENTS as u8 {
        jobs::of_segment(segment, Snapshot::Active, &mut take)?;
    }
    jobs::of_tables(Snapshot::Active, &mut take)?;
    for job in newest.values().rev() {
        push(&mut rows, job, now)?;
    }
    Ok(Returned::Void)
}

/// The job, if it is there and the caller may read it; and the snapshot that showed it.
fn readable(job_id: Option<i64>) -> Result<Option<(Job, Snapshot)>> {
    let Some(job_id) = job_id else { return Ok(None) };
    match find(job_id)? {
        Some(found) if access::may(&found.0.queue, Profile::Reader)? => Ok(Some(found)),
        _ => Ok(None),
    }
}

fn job_attempts(call: &mut Call) -> Result<Returned> {
    let mut rows = call.rows()?;
    let Some((job, snapshot)) = readable(call.i64(0))? else { return Ok(Returned::Void) };
    let time = |at: Option<i64>| at.map(|at| Timestamp(at).to_datum());
    for attempt in timeline::attempts(job.job_id, snapshot)? {
        rows.push(&[
            Some(i32::from(attempt.attempt).to_datum()),
            attempt.receipt.map(|receipt| receipt.to_datum()),
            attempt.runtime.map(|id| id.to_datum()),
            time(attempt.claimed_at),
            time(attempt.closed_at),
            attempt.outcome.map(|outcome| outcome.to_datum()),
            attempt.error.map(|error| error.as_str().to_datum()),
        ])?;
    }
    Ok(Returned::Void)
}

const DUMP: &str = "
SELECT pg_catalog.to_jsonb(j) OPERATOR(pg_catalog.||) pg_catalog.jsonb_build_object(
    'attempts', (SELECT coalesce(pg_catalog.jsonb_agg(
            pg_catalog.to_jsonb(a) OPERATOR(pg_catalog.-) 'ordinality' OPERATOR(pg_catalog.||)
                pg_catalog.jsonb_build_object('priority',
                    $2 OPERATOR(pg_catalog.->) (a.ordinality OPERATOR(pg_catalog.-) 1)::int4)
            ORDER BY a.ordinality), '[]'::pg_catalog.jsonb)
        FROM awa.job_attempts($1) WITH ORDINALITY AS a))
FROM awa.get_job($1) AS j";

/// All there is to know about a job, for a human: its attempts are told with the priority that
/// each was claimed with, which is better than the job's own once it has waited.
fn dump_job(call: &mut Call) -> Result<Returned> {
    let Some((job, snapshot)) = readable(call.i64(0))? else { return Ok(Returned::Null) };
    let own = i16::from(job.priority);
    let priority = |a: &Attempt| a.claimed_at.map(|_| a.priority.unwrap_or(own));
    let attempts = timeline::attempts(job.job_id, snapshot)?;
    let priorities: Value = attempts.iter().map(priority).collect();
    // The owner may read everything; whether the caller may was asked above.
    let dump = spi::as_owner(|spi| {
        spi.query_one(DUMP, &[spi::Arg::of(job.job_id), spi::Arg::of(priorities)], |row| {
            Ok(row.copied_varlena(1))
        })
    })?;
    Ok(dump.flatten().map_or(Returned::Null, Returned::Value))
}
