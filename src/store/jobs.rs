//! Jobs as a reader sees them, put together from the rows under one snapshot. One leaf is
//! open at a time and its lock goes back at once, so a reader holds no reclamation back.

use std::collections::HashMap;

use super::attempts::{self, Note};
use super::body::{self, Body, Placed};
use super::evidence::{self, AttemptEnd, Detail, Evidence, Sight};
use super::kept::{self, Kept};
use super::lanes::{self, LaneRow};
use super::outcome::Outcome;
use super::{deferred, dlq, done, history};
use crate::domain::entities::{SEGMENTS, split};
use crate::error::Result;
use crate::pg::datum::{self, Datum, Json, ToDatum};
use crate::pg::snapshot::Snapshot;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Scheduled,
    Available,
    Running,
    WaitingExternal,
    Completed,
    Retryable,
    Failed,
    Cancelled,
}

impl State {
    pub fn label(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Available => "available",
            Self::Running => "running",
            Self::WaitingExternal => "waiting_external",
            Self::Completed => "completed",
            Self::Retryable => "retryable",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

pub struct Job {
    pub job_id: i64,
    pub queue: String,
    pub priority: u8,
    pub state: State,
    /// Waits in `deferred_jobs`, so that only the worker makes it available.
    pub on_disk: bool,
    /// The running one, or those used.
    pub attempt: i16,
    pub run_at: i64,
    pub receipt: Option<i64>,
    pub deadline: Option<i64>,
    pub attempted_at: Option<i64>,
    pub finalized_at: Option<i64>,
    /// JSON texts, oldest first.
    pub errors: Vec<String>,
    /// What is written about its open attempt.
    pub note: Option<Note>,
    pub progress: Option<Datum>,
    /// Of a completed one: the text of the jsonb.
    pub result: Option<String>,
    pub body: Body,
}

fn errors(body: &Body, ends: &[AttemptEnd]) -> Vec<String> {
    let mut errors = history::errors(body.history);
    errors.extend(ends.iter().filter_map(|end| {
        let error = end.error.as_deref()?;
        Some(history::entry(end.attempt, end.closed_at, error).to_string())
    }));
    errors
}

/// The progress that an earlier attempt made.
fn carried(body: &Body) -> Option<Datum> {
    history::progress(body.history).map(|progress| progress.to_datum())
}

/// The history of a job with the errors of its attempts in its segment, which are in no body
/// yet.
pub fn errors_so_far(segment: u8, placed: &Placed) -> Result<Option<Datum>> {
    let evidence =
        evidence::read_job(segment, Snapshot::SelfNow, placed.job_id(), placed.position)?;
    let ends = evidence.attempts.get(&placed.position).map_or(&[][..], Vec::as_slice);
    let mut history = placed.body.history;
    for end in ends {
        history = history::with_error(history, end.attempt, end.closed_at, end.error.as_deref());
    }
    Ok(history)
}

/// A body in a segment as a job; None when the segment is done with it and another table has
/// it, or nobody.
fn weigh(
    placed: &Placed,
    evidence: &Evidence,
    open: &HashMap<i64, usize>,
    lanes: &HashMap<i64, LaneRow>,
    note: impl Fn(i64) -> Result<Option<Note>>,
) -> Result<Option<Job>> {
    let (number, offset) = split(placed.position);
    let chunk = evidence.chunks.get(&number).copied().unwrap_or_default();
    let Some(lane) = lanes.get(&placed.lane_id) else { return Ok(None) };
    let ends = evidence.attempts.get(&placed.position).map_or(&[][..], Vec::as_slice);
    let last = ends.last();
    let mut job = Job {
        job_id: placed.job_id(),
        queue: lane.queue.clone(),
        priority: lane.priority,
        state: State::Available,
        on_disk: false,
        attempt: placed.body.attempts,
        run_at: placed.body.run_at(),
        receipt: last.map(|end| end.receipt),
        deadline: None,
        attempted_at: last.map(|end| end.claimed_at),
        finalized_at: None,
        errors: errors(&placed.body, ends),
        note: None,
        progress: carried(&placed.body),
        result: None,
        body: placed.body,
    };
    if chunk.disposed.contains(offset) {
        let last = last.filter(|end| end.outcome == Outcome::Completed);
        let Some(last) = last.filter(|_| !chunk.kept.contains(offset)) else { return Ok(None) };
        job.state = State::Completed;
        job.attempt = last.attempt;
        job.finalized_at = Some(last.closed_at);
        job.result = last.result.clone();
        job.progress = None;
    } else if let Some(item) = open.get(&placed.position).and_then(|at| evidence.open.get(*at)) {
        job.note = note(item.receipt)?;
        job.progress = job.note.as_ref().and_then(|note| note.progress).or(job.progress);
        let is_parked = job.note.as_ref().is_some_and(|note| note.parked);
        job.state = if is_parked { State::WaitingExternal } else { State::Running };
        job.attempt = item.attempt;
        job.receipt = Some(item.receipt);
        job.deadline = Some(item.deadline);
        job.attempted_at = evidence.claims.get(item.claim).map(|claim| claim.claimed_at);
    } else if let Some(released) = evidence.released.get(&placed.position) {
        job.state = if released.snoozed { State::Scheduled } else { State::Retryable };
        job.attempt = released.attempts;
        job.run_at = released.due;
    }
    Ok(Some(job))
}

fn by_position(evidence: &Evidence) -> HashMap<i64, usize> {
    evidence.open.iter().enumerate().map(|(at, item)| (item.position, at)).collect()
}

/// The jobs whose bodies lie in a segment.
pub fn of_segment(
    segment: u8,
    snapshot: Snapshot,
    take: &mut impl FnMut(Job) -> Result<bool>,
) -> Result<()> {
    let evidence = evidence::read(segment, Sight::Seen(snapshot), Detail::All, i64::MAX)?;
    if evidence.bodies == 0 {
        return Ok(());
    }
    let lanes = lanes::read_all(snapshot)?;
    let open = by_position(&evidence);
    let notes = if open.is_empty() { HashMap::new() } else { attempts::read_all(snapshot)? };
    let note = |receipt: i64| Ok(notes.get(&receipt).cloned());
    body::scan(segment, snapshot, |placed| match weigh(&placed, &evidence, &open, &lanes, note)? {
        Some(job) => take(job),
        None => Ok(true),
    })
}

fn of_deferred(row: deferred::Deferred) -> Job {
    Job {
        job_id: row.job_id,
        queue: row.queue,
        priority: row.priority,
        state: match row.kind {
            deferred::Kind::Scheduled => State::Scheduled,
            deferred::Kind::Retryable => State::Retryable,
        },
        on_disk: true,
        attempt: row.body.attempts,
        run_at: row.run_at,
        receipt: None,
        deadline: None,
        attempted_at: None,
        finalized_at: None,
        errors: errors(&row.body, &[]),
        note: None,
        progress: carried(&row.body),
        result: None,
        body: row.body,
    }
}

fn of_done(row: done::Done) -> Job {
    Job {
        job_id: row.job_id,
        queue: row.queue,
        priority: row.priority,
        state: if row.failed { State::Failed } else { State::Cancelled },
        on_disk: true,
        attempt: row.body.attempts,
        run_at: row.run_at,
        receipt: row.last_receipt,
        deadline: None,
        attempted_at: row.attempted_at,
        finalized_at: Some(row.finalized_at),
        errors: errors(&row.body, &[]),
        note: None,
        progress: carried(&row.body),
        result: None,
        body: row.body,
    }
}

fn of_kept(row: Kept) -> Job {
    let result = row.result.map(datum::own_json_text);
    Job { state: State::Completed, progress: None, result, ..of_done(row.done) }
}

/// The completed jobs between two positions that have not moved out of their segment.
pub fn completed_within(
    segment: u8,
    (first, last): (i64, i64),
    evidence: &Evidence,
    lanes: &HashMap<i64, LaneRow>,
    mut take: impl FnMut(&Placed, Kept),
) -> Result<()> {
    body::scan_within(segment, first, last, |placed| {
        let (number, offset) = split(placed.position);
        let chunk = evidence.chunks.get(&number).copied().unwrap_or_default();
        let is_there = chunk.completed.contains(offset) && !chunk.kept.contains(offset);
        let ends = evidence.attempts.get(&placed.position).map_or(&[][..], Vec::as_slice);
        if let (true, Some(end), Some(lane)) = (is_there, ends.last(), lanes.get(&placed.lane_id)) {
            let mut body = placed.body;
            body.attempts = end.attempt;
            for end in ends {
                let error = end.error.as_deref();
                body.history = history::with_error(body.history, end.attempt, end.closed_at, error);
            }
            let done = done::Done {
                job_id: placed.job_id(),
                failed: false,
                finalized_at: end.closed_at,
                attempted_at: Some(end.claimed_at),
                last_receipt: Some(end.receipt),
                queue: lane.queue.clone(),
                priority: lane.priority,
                shard: lane.shard,
                run_at: placed.body.run_at(),
                body,
            };
            let result = end.result.as_deref().map(|text| Json(text).to_datum());
            take(&placed, Kept { done, result });
        }
        Ok(())
    })
}

/// The jobs that lie outside the segments.
pub fn of_tables(snapshot: Snapshot, take: &mut impl FnMut(Job) -> Result<bool>) -> Result<()> {
    deferred::read_all(snapshot, |row| take(of_deferred(row)))?;
    done::read_all(snapshot, |row| take(of_done(row)))?;
    dlq::read_all(snapshot, |row| take(of_done(row.done)))?;
    kept::read_all(snapshot, |row| take(of_kept(row)))
}

/// One job, wherever it is.
pub fn find(job_id: i64, snapshot: Snapshot) -> Result<Option<Job>> {
    for segment in 0..SEGMENTS as u8 {
        for placed in body::find(segment, job_id, snapshot)? {
            let evidence = evidence::read_job(segment, snapshot, job_id, placed.position)?;
            // A segment that was emptied meanwhile says nothing of its jobs any more.
            let same = |again: &Placed| again.position == placed.position;
            if !body::find(segment, job_id, snapshot)?.iter().any(same) {
                continue;
            }
            let lanes = lanes::read_all(snapshot)?;
            let note = |receipt| attempts::read(job_id, receipt, snapshot);
            let open = by_position(&evidence);
            if let Some(job) = weigh(&placed, &evidence, &open, &lanes, note)? {
                return Ok(Some(job));
            }
        }
    }
    if let Some(row) = deferred::find(job_id, snapshot)? {
        return Ok(Some(of_deferred(row)));
    }
    if let Some(row) = done::find(job_id, snapshot)? {
        return Ok(Some(of_done(row)));
    }
    if let Some(row) = dlq::find(job_id, snapshot)? {
        return Ok(Some(of_done(row.done)));
    }
    Ok(kept::find(job_id, snapshot)?.map(of_kept))
}
