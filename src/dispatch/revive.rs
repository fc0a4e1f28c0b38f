//! Jobs that came to their end, once more: tried again, or forgotten.

use super::enqueue::{self, Promoted};
use super::keys::{self, Patience, Switched, Switcher};
use super::seize::{self, Seized};
use crate::domain::unique::State;
use crate::error::{Error, Result, SqlState};
use crate::pg::snapshot::Snapshot;
use crate::pg::xact;
use crate::store::deferred::Kind;
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

/// Makes a failed or cancelled job available again. Its attempts start over; its receipts
/// go on.
///
/// * `may` - refuses a caller who may not act on the queue
pub fn retry(job_id: i64, may: impl Fn(&str) -> Result<()>) -> Result<()> {
    for _ in 0..LOOKS {
        let Some(row) = done::find(job_id, Snapshot::SelfNow)? else { break };
        may(&row.queue)?;
        if done::delete(&[job_id])?.is_empty() {
            if seize::is_blind() {
                return Err(seize::not_serializable());
            }
            continue;
        }
        if let Some(holder) = revive(vec![row])?.first().map(|(_, holder)| *holder) {
            return Err(keys::conflict(holder));
        }
        return Ok(());
    }
    let Some(job) = jobs::find(job_id, Snapshot::SelfNow)? else {
        return Err(seize::not_found(job_id));
    };
    may(&job.queue)?;
    Err(wrong_state(job_id, "retried", job.state.label())
        .hint("Only failed and cancelled jobs can be retried."))
}

/// Puts jobs, whose rows are deleted, back into their lanes. Those whose unique key another
/// job has got meanwhile stay out, and come back with the one that has it.
fn revive(rows: Vec<Done>) -> Result<Vec<(Done, i64)>> {
    let mut switcher = Switcher::new(Patience::Wait);
    let now = xact::micros();
    let mut refused = Vec::new();
    let mut ready: Vec<(String, Vec<Promoted>)> = Vec::new();
    for row in rows {
        let from = ended(&row);
        if let Switched::Lost(holder) =
            switcher.switch(row.job_id, &row.body, from, State::Available)?
        {
            refused.push((row, holder));
            continue;
        }
        let mut body = row.body;
        body.attempts = 0;
        body.run_at = Some(now);
        let Done { job_id, priority, shard, queue, .. } = row;
        let job = Promoted { job_id, priority, shard, body };
        match ready.iter_mut().find(|(name, _)| *name == queue) {
            Some((_, jobs)) => jobs.push(job),
            None => ready.push((queue, vec![job])),
        }
    }
    super::begin_write(super::attach()?)?;
    for (queue, jobs) in ready {
        enqueue::promote(&queue, jobs)?;
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
    let refused = revive(rows)?;
    let kept: Vec<Done> = refused.into_iter().map(|(row, _)| row).collect();
    done::write(&kept)?;
    Ok((count - kept.len()) as u64)
}

/// Forgets failed jobs, and returns how many.
pub fn discard_failed(admits: impl Fn(&Done) -> Result<bool>) -> Result<u64> {
    forget(&take_failed(admits)?)
}

/// Frees the keys of jobs whose rows are deleted.
pub fn forget(rows: &[Done]) -> Result<u64> {
    let mut switcher = Switcher::new(Patience::Wait);
    for row in rows {
        switcher.drop_key(row.job_id, &row.body, ended(row))?;
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
        // Its row is in a segment, which knows no deletes.
        return Err(wrong_state(job_id, "deleted", "completed")
            .hint("Completed jobs go with \"awa.completed_retention\"."));
    }
    let Some(row) = done::find(job_id, Snapshot::SelfNow)? else {
        return Err(seize::not_found(job_id));
    };
    if done::delete(&[job_id])?.is_empty() {
        return Err(if seize::is_blind() {
            seize::not_serializable()
        } else {
            seize::not_found(job_id)
        });
    }
    forget(&[row]).map(|_| ())
}
