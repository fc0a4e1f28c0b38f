//! A job whose unique key is held by one that waits, which takes over what the new one says.

use super::enqueue::{self, NewJob, Promoted, write_deferred};
use super::keys::{self, Patience, Switched, Switcher};
use super::seize::{self, Seized};
use super::session::{attach, begin_write, end_write};
use crate::domain::entities::AS_BODY;
use crate::domain::unique::State;
use crate::error::Result;
use crate::pg::xact;
use crate::store::body::Body;
use crate::store::deferred::{Deferred, Kind};
use crate::store::outcome::Outcome;
use crate::store::{jobs, queues};

/// How a producer wants a job replaced that holds the key of a new one.
#[derive(Clone, Copy, Debug)]
pub struct Replace {
    /// It also gets the time of the new one.
    pub moves: bool,
    /// Refuses a caller who may not produce for the queue.
    pub may: fn(&str) -> Result<()>,
}

/// A waiting job, taken out of its place.
struct Old {
    job_id: i64,
    state: State,
    /// When it is due, if it waits for that.
    due: i64,
    queue: String,
    priority: u8,
    shard: u8,
    body: Body,
}

/// Gives the job that holds a key what the new one says, if it waits; a running one stays as
/// it is. False: it has come to its end meanwhile, and may hold the key no more.
pub fn replace(holder: i64, job: &NewJob, how: Replace) -> Result<bool> {
    match seize::seize_waiting(holder, false)? {
        None => Ok(true),
        Some(Seized::Waiting(waiting)) => {
            (how.may)(&waiting.queue)?;
            let mut body = waiting.placed.body;
            body.attempts = waiting.attempts();
            if waiting.withdrawn.prior != AS_BODY {
                // What its attempts said is in the segment that it leaves.
                body.history = jobs::errors_so_far(waiting.withdrawn.segment, &waiting.placed)?;
            }
            body.run_at = Some(body.run_at());
            waiting.close(Outcome::Moved, xact::micros(), None)?;
            let old = Old {
                job_id: holder,
                state: waiting.state(),
                due: waiting.withdrawn.due,
                queue: waiting.queue,
                priority: waiting.withdrawn.priority,
                shard: waiting.withdrawn.shard,
                body,
            };
            write(old, job, how).map(|()| true)
        }
        Some(Seized::Deferred(row)) => {
            (how.may)(&row.queue)?;
            let state = match row.kind {
                Kind::Scheduled => State::Scheduled,
                Kind::Retryable => State::Retryable,
            };
            let Deferred { run_at: due, queue, priority, shard, body, .. } = *row;
            let old = Old { job_id: holder, state, due, queue, priority, shard, body };
            write(old, job, how).map(|()| true)
        }
        Some(Seized::Own(_)) => Err(seize::own(holder)),
        Some(Seized::Finished(_) | Seized::Running(_) | Seized::Unknown) => Ok(false),
    }
}

/// Writes the job anew, into its lane or aside. It keeps its key where its mask says so.
fn write(old: Old, job: &NewJob, how: Replace) -> Result<()> {
    let now = xact::micros();
    let Old { job_id, state, queue, shard, mut body, .. } = old;
    body.args = job.body.args;
    body.metadata = job.body.metadata;
    body.tags = job.body.tags;
    let priority = match job.priority {
        Some(priority) => priority,
        None => {
            let (_, at) = queues::ensure_loaded(&queue)?;
            super::with(|d| d.queues.get(at).map_or(old.priority, |q| q.settings.priority))
        }
    };
    let waits_for = match (how.moves, state) {
        (true, _) => job.run_at.filter(|at| *at > now).map(|at| (Kind::Scheduled, at)),
        (false, State::Scheduled) => Some((Kind::Scheduled, old.due)),
        (false, State::Retryable) => Some((Kind::Retryable, old.due)),
        (false, _) => None,
    };
    let to = match waits_for {
        Some((Kind::Scheduled, _)) => State::Scheduled,
        Some((Kind::Retryable, _)) => State::Retryable,
        None => State::Available,
    };
    if let Switched::Lost(holder) =
        Switcher::new(Patience::Wait).switch(job_id, &body, state, to)?
    {
        return Err(keys::conflict(holder));
    }
    let db = attach()?;
    begin_write(db)?;
    match waits_for {
        Some((kind, run_at)) => {
            body.run_at = None;
            write_deferred(db, &[Deferred { job_id, kind, run_at, queue, priority, shard, body }])?;
        }
        None => {
            if how.moves {
                body.run_at = Some(job.run_at.unwrap_or(now));
            }
            enqueue::promote(&queue, vec![Promoted { job_id, priority, shard, body }])?;
        }
    }
    end_write();
    Ok(())
}
