//! Jobs that came to their end, once more: tried again, or forgotten.

use std::collections::HashMap;

use super::close;
use super::enqueue::{self, Promoted};
use super::keys::{self, Patience, Switched, Switcher};
use super::seize::{self, Seized};
use crate::domain::unique::State;
use crate::error::{Error, Result, SqlState};
use crate::pg::snapshot::Snapshot;
use crate::pg::xact;
use crate::store::deferred::{Deferred, Kind};
use crate::store::dlq::{self, Dead};
use crate::store::done::{self, Done};
use crate::store::jobs;
use crate::store::outcome::Outcome;

/// Looks at a job that somebody else retries at the same time.
const LOOKS: u32 = 3;

fn ended(done: &Done) -> State {
    if done.failed { State::Failed } else { State::Cancelled }
}

/// 55000.
fn wrong_state(job_id: i64, act: &str, state: &str) -> Error {
    Error::new(SqlState::WRONG_STATE, format!("job {job_id} cannot be {act}: it is {state}"))
}

/// Makes a failed, cancelled or parked job available again. Its attempts start over; its
/// receipts go on. A parked job that was asked to stop is cancelled. Returns the label of the
/// job's state.
///
/// * `may` - refuses a caller who may not act on the queue
pub fn retry(job_id: i64, may: impl Fn(&str) -> Result<()>) -> Result<&'static str> {
    for _ in 0..LOOKS {
        let Some(row) = done::find(job_id, Snapshot::SelfNow)? else { break };
        may(&row.queue)?;
        if done::delete(&[job_id])?.is_empty() {
            continue;
        }
        if let Some(holder) = revive(vec![row], None)?.first().map(|(_, holder)| *holder) {
            return Err(keys::conflict(holder));
        }
        return Ok("available");
    }
    if let Some(dead) = dlq::find(job_id, Snapshot::SelfNow)? {
        may(&dead.done.queue)?;
        return Err(wrong_state(job_id, "retried", "a dead letter").hint("Use awa.dlq_retry()."));
    }
    let Some(job) = jobs::find(job_id, Snapshot::SelfNow)? else {
        return Err(seize::not_found(job_id));
    };
    may(&job.queue)?;
    if job.state == jobs::State::WaitingExternal
        && let Seized::Running(hold) = seize::seize(job_id, false)?
        && hold.is_parked()
    {
        return close::restart(hold);
    }
    Err(wrong_state(job_id, "retried", job.state.label())
        .hint("Only failed, cancelled and parked jobs can be retried."))
}

/// What a dead letter is revived with, where it differs from what it was.
#[derive(Default)]
pub struct Changes {
    pub priority: Option<u8>,
    pub queue: Option<String>,
    pub run_at: Option<i64>,
}

/// Makes a dead letter a job again: available, or scheduled. Returns the label of its state.
/// Its attempts start over; its receipts go on.
pub fn retry_dead(
    job_id: i64,
    changes: &Changes,
    may: impl Fn(&str) -> Result<()>,
) -> Result<&'static str> {
    for _ in 0..LOOKS {
        let Some(dead) = dlq::find(job_id, Snapshot::SelfNow)? else { break };
        let mut row = dead.done;
        may(&row.queue)?;
        if dlq::delete(&[job_id])?.is_empty() {
            continue;
        }
        if let Some(queue) = &changes.queue {
            may(queue)?;
            row.queue.clone_from(queue);
            row.shard = 0;
        }
        row.priority = changes.priority.unwrap_or(row.priority);
        let run_at = changes.run_at.filter(|at| *at > xact::micros());
        if let Some(holder) = revive(vec![row], run_at)?.first().map(|(_, holder)| *holder) {
            return Err(keys::conflict(holder));
        }
        return Ok(if run_at.is_some() { "scheduled" } else { "available" });
    }
    let Some(job) = jobs::find(job_id, Snapshot::SelfNow)? else {
        return Err(seize::not_found(job_id));
    };
    may(&job.queue)?;
    Err(wrong_state(job_id, "retried", job.state.label()).hint("It is no dead letter."))
}

/// Takes the dead letters out that `admits` lets through.
fn take_dead(admits: impl Fn(&Done) -> Result<bool>) -> Result<Vec<Dead>> {
    let mut rows = Vec::new();
    dlq::read_all(Snapshot::SelfNow, |row| {
        if admits(&row.done)? {
            rows.push(row);
        }
        Ok(true)
    })?;
    // In the order of all who take several keys.
    rows.sort_by_cached_key(|row| (keys::of(&row.done.body), row.done.job_id));
    let ids: Vec<i64> = rows.iter().map(|row| row.done.job_id).collect();
    let taken = dlq::delete(&ids)?;
    rows.retain(|row| taken.binary_search(&row.done.job_id).is_ok());
    Ok(rows)
}

/// Makes dead letters jobs again, and returns how many; those whose unique key went to
/// another job stay where they are.
pub fn retry_all_dead(admits: impl Fn(&Done) -> Result<bool>) -> Result<u64> {
    let rows = take_dead(admits)?;
    let count = rows.len();
    let reasons: HashMap<i64, String> =
        rows.iter().map(|row| (row.done.job_id, row.reason.clone())).collect();
    let refused = revive(rows.into_iter().map(|row| row.done).collect(), None)?;
    let kept: Vec<Dead> = refused
        .into_iter()
        .map(|(done, _)| Dead {
            reason: reasons.get(&done.job_id).cloned().unwrap_or_default(),
            done,
        })
        .collect();
    dlq::write(&kept)?;
    Ok((count - kept.len()) as u64)
}

/// Forgets dead letters, and returns how many.
pub fn purge_dead(admits: impl Fn(&Done) -> Result<bool>) -> Result<u64> {
    let rows: Vec<Done> = take_dead(admits)?.into_iter().map(|row| row.done).collect();
    forget(&rows)
}

/// Makes a failed job a dead letter; false when it is one.
pub fn bury(job_id: i64, reason: &str, may: impl Fn(&str) -> Result<()>) -> Result<bool> {
    for _ in 0..LOOKS {
        if let Some(dead) = dlq::find(job_id, Snapshot::SelfNow)? {
            may(&dead.done.queue)?;
            return Ok(false);
        }
        let Some(mut done) = done::find(job_id, Snapshot::SelfNow)?.filter(|row| row.failed) else {
            break;
        };
        may(&done.queue)?;
        if done::delete(&[job_id])?.is_empty() {
            continue;
        }
        done.finalized_at = xact::micros();
        dlq::write(&[Dead { done, reason: reason.to_owned() }])?;
        return Ok(true);
    }
    let Some(job) = jobs::find(job_id, Snapshot::SelfNow)? else {
        return Err(seize::not_found(job_id));
    };
    may(&job.queue)?;
    Err(wrong_state(job_id, "made a dead letter", job.state.label())
        .hint("Only failed jobs can be made dead letters."))
}

/// Puts jobs, whose rows are deleted, back into their lanes. Those whose unique key another
/// job has got meanwhile stay out, and come back with the one that has it.
///
/// * `run_at` - in the future: they are scheduled instead
fn revive(rows: Vec<Done>, run_at: Option<i64>) -> Result<Vec<(Done, i64)>> {
    let mut switcher = Switcher::new(Patience::Wait);
    let now = xact::micros();
    let mut refused = Vec::new();
    let mut ready: Vec<(String, Vec<Promoted>)> = Vec::new();
    let mut later: Vec<Deferred> = Vec::new();
    let to = if run_at.is_some() { State::Scheduled } else { State::Available };
    for row in rows {
        let from = ended(&row);
        if let Switched::Lost(holder) = switcher.switch(row.job_id, &row.body, from, to)? {
            refused.push((row, holder));
            continue;
        }
        let mut body = row.body;
        body.attempts = 0;
        body.run_at = Some(now);
        let Done { job_id, priority, shard, queue, .. } = row;
        if let Some(run_at) = run_at {
            let kind = Kind::Scheduled;
            later.push(Deferred { job_id, kind, run_at, queue, priority, shard, body });
            continue;
        }
        let job = Promoted { job_id, priority, shard, body };
        match ready.iter_mut().find(|(name, _)| *name == queue) {
            Some((_, jobs)) => jobs.push(job),
            None => ready.push((queue, vec![job])),
        }
    }
    let db = super::attach()?;
    super::begin_write(db)?;
    for (queue, jobs) in ready {
        enqueue::promote(&queue, jobs)?;
    }
    if !later.is_empty() {
        enqueue::write_deferred(db, &later)?;
    }
    super::end_write();
    Ok(refused)
}

/// Failed jobs of these queues and of this kind.
fn take_failed(admits: impl Fn(&Done) -> Result<bool>) -> Result<Vec<Done>> {
    let mut rows = Vec::new();
    done::read_all(Snapshot::SelfNow, |row| {
        if row.failed && admits(&row)? {
            rows.push(row);
        }
        Ok(true)
    })?;
    // In the order of all who take several keys.
    rows.sort_by_cached_key(|row| (keys::of(&row.body), row.job_id));
    let ids: Vec<i64> = rows.iter().map(|row| row.job_id).collect();
    let mut taken = done::delete(&ids)?;
    taken.sort_unstable();
    rows.retain(|row| taken.binary_search(&row.job_id).is_ok());
    Ok(rows)
}

/// Retries all failed jobs that `admits` lets through, and returns how many; those whose
/// unique key went to another job stay as they are.
pub fn retry_failed(admits: impl Fn(&Done) -> Result<bool>) -> Result<u64> {
    let rows = take_failed(admits)?;
    let count = rows.len();
    let refused = revive(rows, None)?;
    let kept: Vec<Done> = refused.into_iter().map(|(row, _)| row).collect();
    done::write(&kept)?;
    Ok((count - kept.len()) as u64)
}

/// Forgets failed jobs, dead letters too, and returns how many.
pub fn discard_failed(admits: impl Fn(&Done) -> Result<bool>) -> Result<u64> {
    Ok(forget(&take_failed(&admits)?)? + purge_dead(admits)?)
}

/// Frees the keys of jobs whose rows are deleted.
pub fn forget(rows: &[Done]) -> Result<u64> {
    let mut switcher = Switcher::new(Patience::Wait);
    for row in rows {
        switcher.drop_key(row.job_id, &row.body, ended(row))?;
    }
    Ok(rows.len() as u64)
}

/// The same of completed jobs.
pub fn forget_completed(rows: &[Done]) -> Result<u64> {
    let mut switcher = Switcher::new(Patience::Wait);
    for row in rows {
        switcher.drop_key(row.job_id, &row.body, State::Completed)?;
    }
    Ok(rows.len() as u64)
}

/// Forgets a job that is not running.
pub fn delete(job_id: i64, may: impl Fn(&str) -> Result<()>) -> Result<()> {
    let mut switcher = Switcher::new(Patience::Wait);
    match seize::seize(job_id, false)? {
        Seized::Waiting(waiting) => {
            may(&waiting.queue)?;
            switcher.drop_key(job_id, &waiting.placed.body, waiting.state())?;
            waiting.close(Outcome::Moved, xact::micros(), None)
        }
        Seized::Deferred(row) => {
            may(&row.queue)?;
            let state = match row.kind {
                Kind::Scheduled => State::Scheduled,
                Kind::Retryable => State::Retryable,
            };
            switcher.drop_key(job_id, &row.body, state)
        }
        Seized::Finished(job) => {
            may(&job.queue)?;
            delete_finished(job_id, job.state)
        }
        Seized::Running(hold) => {
            may(&hold.queue())?;
            if hold.is_parked() {
                return close::forget(hold);
            }
            Err(wrong_state(job_id, "deleted", "running").hint("Cancel it first."))
        }
        Seized::Own(job) => {
            may(&job.queue)?;
            Err(seize::own(job_id))
        }
        Seized::Unknown => Err(seize::not_found(job_id)),
    }
}

fn delete_finished(job_id: i64, state: jobs::State) -> Result<()> {
    if state == jobs::State::Completed {
        // Its row is in a segment, which knows no deletes, or has been there.
        return Err(wrong_state(job_id, "deleted", "completed")
            .hint("Completed jobs go with \"awa.completed_retention\"."));
    }
    let (row, gone) = match done::find(job_id, Snapshot::SelfNow)? {
        Some(row) => (row, done::delete(&[job_id])?),
        None => match dlq::find(job_id, Snapshot::SelfNow)? {
            Some(dead) => (dead.done, dlq::delete(&[job_id])?),
            None => return Err(seize::not_found(job_id)),
        },
    };
    if gone.is_empty() {
        return Err(seize::not_found(job_id));
    }
    forget(&[row]).map(|_| ())
}
