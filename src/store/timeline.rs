//! The attempts of one job, as far as they are still told: by the segments it was in, and
//! before those by the errors it carries along.

use serde_json::Value;

use super::evidence::{self, AttemptEnd, Evidence};
use super::kept::Kept;
use super::outcome::Outcome;
use super::{body, deferred, dlq, done, history, kept};
use crate::domain::entities::SEGMENTS;
use crate::error::Result;
use crate::pg::datum::{self, Timestamp};
use crate::pg::snapshot::Snapshot;

/// One attempt. What is not known any more, or not yet, is None.
pub struct Attempt {
    pub attempt: i16,
    pub receipt: Option<i64>,
    pub runtime: Option<[u8; 16]>,
    /// With which it was claimed, if age had raised it.
    pub priority: Option<i16>,
    pub claimed_at: Option<i64>,
    pub closed_at: Option<i64>,
    pub outcome: Option<&'static str>,
    pub error: Option<String>,
}

/// The attempts of a job, oldest first.
pub fn attempts(job_id: i64, snapshot: Snapshot) -> Result<Vec<Attempt>> {
    let mut attempts = Vec::new();
    let mut told = Vec::new();
    for segment in 0..SEGMENTS as u8 {
        for placed in body::find(segment, job_id, snapshot)? {
            let mut evidence = evidence::read_job(segment, snapshot, job_id, placed.position)?;
            let ends = evidence.attempts.remove(&placed.position).unwrap_or_default();
            attempts.extend(ends.into_iter().map(of_end));
            attempts.extend(open(&evidence, placed.position));
            told.push(placed.body.history);
        }
    }
    told.extend(deferred::find(job_id, snapshot)?.map(|row| row.body.history));
    told.extend(done::find(job_id, snapshot)?.map(|row| row.body.history));
    told.extend(dlq::find(job_id, snapshot)?.map(|row| row.done.body.history));
    if let Some(Kept { done, .. }) = kept::find(job_id, snapshot)? {
        told.push(done.body.history);
        // Its segment may still tell it.
        if !attempts.iter().any(|attempt| attempt.receipt == done.last_receipt) {
            attempts.push(Attempt {
                attempt: done.body.attempts,
                receipt: done.last_receipt,
                runtime: None,
                priority: None,
                claimed_at: done.attempted_at,
                closed_at: Some(done.finalized_at),
                outcome: Some("completed"),
                error: None,
            });
        }
    }
    attempts.sort_by_key(|attempt| attempt.receipt);
    let mut earlier: Vec<Attempt> = Vec::new();
    for error in told.into_iter().flat_map(history::entries) {
        let Some(found) = of_error(&error) else { continue };
        let same = |a: &Attempt| a.attempt == found.attempt;
        if !attempts.iter().any(same) && !earlier.iter().any(same) {
            earlier.push(found);
        }
    }
    earlier.sort_by_key(|attempt| attempt.attempt);
    earlier.append(&mut attempts);
    Ok(earlier)
}

fn of_end(end: AttemptEnd) -> Attempt {
    let outcome = match end.outcome {
        Outcome::Completed | Outcome::Kept => "completed",
        Outcome::Retryable => "retryable",
        Outcome::Released => "released",
        Outcome::Snoozed => "snoozed",
        Outcome::Failed | Outcome::DeadLettered => "failed",
        Outcome::Cancelled => "cancelled",
        // It went on on disk.
        Outcome::Moved if end.error.is_some() => "retryable",
        Outcome::Moved => "snoozed",
    };
    Attempt {
        attempt: end.attempt,
        receipt: Some(end.receipt),
        runtime: end.runtime,
        priority: end.priority,
        claimed_at: Some(end.claimed_at),
        closed_at: Some(end.closed_at),
        outcome: Some(outcome),
        error: end.error,
    }
}

fn open(evidence: &Evidence, position: i64) -> Option<Attempt> {
    let item = evidence.open.iter().find(|item| item.position == position)?;
    let claim = evidence.claims.get(item.claim)?;
    Some(Attempt {
        attempt: item.attempt,
        receipt: Some(item.receipt),
        runtime: claim.runtime,
        priority: claim.priority,
        claimed_at: Some(claim.claimed_at),
        closed_at: None,
        outcome: None,
        error: None,
    })
}

/// Attempt 0 is a job that came to its end unclaimed.
fn of_error(error: &Value) -> Option<Attempt> {
    let attempt = error.get("attempt").and_then(Value::as_i64)?;
    let attempt = i16::try_from(attempt).ok().filter(|attempt| *attempt > 0)?;
    let at = error.get("at").and_then(Value::as_str);
    Some(Attempt {
        attempt,
        receipt: None,
        runtime: None,
        priority: None,
        claimed_at: None,
        closed_at: at.and_then(|at| datum::parse_timestamp(at).ok()).map(|Timestamp(at)| at),
        outcome: None,
        error: error.get("error").and_then(Value::as_str).map(str::to_owned),
    })
}
