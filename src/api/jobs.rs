//! The view `awa.jobs` and get_job: from the tables alone, so a standby has them too.

use super::access;
use crate::dispatch;
use crate::domain::entities::SEGMENTS;
use crate::error::Result;
use crate::pg::call::{Call, Returned, Rows, sql_function};
use crate::pg::datum::{self, Datum, Element, Json, Timestamp, ToDatum};
use crate::pg::snapshot::Snapshot;
use crate::pg::{catalog, xact};
use crate::store::acl::Profile;
use crate::store::jobs::{self, Job, State};

sql_function!(awa_jobs_rows, all);
sql_function!(awa_get_job, one);

/// The member of the metadata that shows what a callback brought.
const CALLBACK_RESULT: &str = "_awa_callback_result";

/// Which queues the caller may read; asked once a queue.
pub struct Gate {
    master: bool,
    known: Vec<(String, bool)>,
}

impl Gate {
    pub fn new() -> Result<Self> {
        Ok(Self { master: access::is_master()?, known: Vec::new() })
    }

    pub fn admits(&mut self, queue: &str) -> Result<bool> {
        if self.master {
            return Ok(true);
        }
        if let Some((_, may)) = self.known.iter().find(|(name, _)| name == queue) {
            return Ok(*may);
        }
        let may = access::may(queue, Profile::Reader)?;
        self.known.push((queue.to_owned(), may));
        Ok(may)
    }
}

fn all(call: &mut Call) -> Result<Returned> {
    let mut rows = call.rows()?;
    let mut gate = Gate::new()?;
    let now = xact::micros();
    let mut take = |job: Job| {
        if gate.admits(&job.queue)? {
            push(&mut rows, &job, now)?;
        }
        Ok(true)
    };
    for segment in 0..SEGMENTS as u8 {
        jobs::of_segment(segment, Snapshot::Active, &mut take)?;
    }
    jobs::of_tables(Snapshot::Active, &mut take)?;
    Ok(Returned::Void)
}

fn one(call: &mut Call) -> Result<Returned> {
    let mut rows = call.rows()?;
    let Some(job_id) = call.i64(0) else { return Ok(Returned::Void) };
    if let Some((job, _)) = find(job_id)?
        && access::may(&job.queue, Profile::Reader)?
    {
        push(&mut rows, &job, xact::micros())?;
    }
    Ok(Returned::Void)
}

/// A job, and the snapshot that shows it. A job that moves between tables meanwhile is in
/// neither for an older snapshot: a read that finds nothing looks once more.
pub fn find(job_id: i64) -> Result<Option<(Job, Snapshot)>> {
    for snapshot in [Snapshot::Active, Snapshot::Latest] {
        if let Some(job) = jobs::find(job_id, snapshot)? {
            return Ok(Some((job, snapshot)));
        }
    }
    Ok(None)
}

/// The state of a job at a time.
pub fn shown_state(job: &Job, now: i64) -> &'static str {
    match job.state {
        // Its time has come; the worker has not got round to it, or need not.
        State::Retryable | State::Scheduled if job.run_at <= now && !job.on_disk => "available",
        state => state.label(),
    }
}

/// Extensions live in memory only; a standby has none.
fn deadline(job: &Job) -> Option<i64> {
    let receipt = job.receipt.filter(|_| job.state == State::Running)?;
    if xact::is_in_recovery() {
        return job.deadline;
    }
    dispatch::deadline_of(receipt).or(job.deadline)
}

pub fn push(rows: &mut Rows, job: &Job, now: i64) -> Result<()> {
    rows.push(&row(job, now)?)
}

/// How many columns `awa.jobs` has, and one of them.
pub const COLUMNS: usize = 27;
pub const ERRORS: usize = 14;

/// A job as a row of `awa.jobs`.
pub fn row(job: &Job, now: i64) -> Result<[Option<Datum>; COLUMNS]> {
    let time = |at: Option<i64>| at.filter(|at| *at != i64::MAX).map(|at| Timestamp(at).to_datum());
    let body = &job.body;
    let errors = (!job.errors.is_empty()).then(|| {
        let errors: Vec<Option<Datum>> =
            job.errors.iter().map(|e| Some(Json(e).to_datum())).collect();
        datum::array(Element::JSONB, &errors)
    });
    let note = job.note.as_ref();
    let metadata = body.metadata.unwrap_or_else(|| Json("{}").to_datum());
    // Whatever it is, it is no part of what the job was enqueued with.
    let metadata = match note.and_then(|note| note.callback_result) {
        Some(result) => {
            let result = datum::own_json_text(result);
            let member = Json(&format!("{{\"{CALLBACK_RESULT}\": {result}}}")).to_datum();
            datum::json_merged(metadata, member)
        }
        None => metadata,
    };
    Ok([
        Some(job.job_id.to_datum()),
        Some(body.kind),
        Some(job.queue.as_str().to_datum()),
        Some(body.args),
        Some(catalog::job_state(shown_state(job, now))?),
        Some(i16::from(job.priority).to_datum()),
        Some(job.attempt.to_datum()),
        Some(body.max_attempts.to_datum()),
        time(Some(job.run_at)),
        None,
        time(deadline(job)),
        time(job.attempted_at),
        time(job.finalized_at),
        time(Some(body.created_at)),
        errors,
        Some(metadata),
        Some(body.tags.unwrap_or_else(|| datum::text_array::<&str>(&[]))),
        body.unique_key,
        body.unique_states,
        note.and_then(|note| note.callback_id).map(|id| id.to_datum()),
        time(note.and_then(|note| note.callback_timeout_at)),
        None,
        None,
        None,
        None,
        Some(job.receipt.unwrap_or(0).to_datum()),
        job.progress,
    ])
}
