//! Cancelling a job, wherever it is, or all that wait in a queue.

use std::collections::BTreeMap;

use super::close::{self, Closer, Hold};
use super::keys::{Patience, Switcher};
use super::seize::{self, Seized, Waiting};
use super::session::confirm;
use crate::domain::entities::{AS_BODY, SEGMENTS};
use crate::domain::undo::End;
use crate::domain::unique::State;
use crate::error::Result;
use crate::pg::snapshot::Snapshot;
use crate::pg::xact;
use crate::store::body;
use crate::store::changes::{self, Change};
use crate::store::deferred::{Deferred, Kind};
use crate::store::done::{self, Done};
use crate::store::outcome::Outcome;
use crate::store::{attempts, history, jobs};

/// Cancels the job, or asks its attempt to stop. Returns the label of the state it is in
/// then.
///
/// * `force` - a running job is cancelled too, and its receipt is stale; a parked one is in
///   any case, for nobody works on it who could be asked
/// * `may` - refuses a caller who may not act on the queue
pub fn cancel(
    job_id: i64,
    reason: Option<&str>,
    force: bool,
    may: impl Fn(&str) -> Result<()>,
) -> Result<&'static str> {
    match seize::seize(job_id, true)? {
        Seized::Waiting(waiting) => {
            may(&waiting.queue)?;
            cancel_waiting(*waiting, reason)?;
            Ok("cancelled")
        }
        Seized::Deferred(row) => {
            may(&row.queue)?;
            count_cancelled(&row.queue, 1)?;
            cancel_deferred(*row, reason)?;
            Ok("cancelled")
        }
        Seized::Running(hold) => {
            may(&hold.queue())?;
            if force || hold.is_parked() {
                close::cancel(hold, reason)?;
                return Ok("cancelled");
            }
            ask(hold, reason)?;
            Ok("running")
        }
        Seized::Finished(job) => {
            may(&job.queue)?;
            Ok(job.state.label())
        }
        Seized::Own(job) => {
            may(&job.queue)?;
            // A second request to stop changes nothing.
            match job.state {
                jobs::State::Running if !force => Ok("running"),
                _ => Err(seize::own(job_id)),
            }
        }
        Seized::Unknown => Err(seize::not_found(job_id)),
    }
}

fn cancel_waiting(waiting: Waiting, reason: Option<&str>) -> Result<()> {
    let now = xact::micros();
    let Waiting { withdrawn, ref queue, placed, .. } = waiting;
    let mut body = placed.body;
    let mut switcher = Switcher::new(Patience::Wait);
    switcher.end(placed.job_id(), &mut body, waiting.state(), State::Cancelled)?;
    body.attempts = waiting.attempts();
    if withdrawn.prior != AS_BODY {
        // What its attempts in this segment said would go with the segment.
        body.history = jobs::errors_so_far(withdrawn.segment, &placed)?;
    }
    body.history = history::with_error(body.history, body.attempts, now, reason);
    done::write(&[Done {
        job_id: placed.job_id(),
        failed: false,
        finalized_at: now,
        attempted_at: None,
        last_receipt: None,
        queue: queue.clone(),
        priority: withdrawn.priority,
        shard: withdrawn.shard,
        run_at: placed.body.run_at(),
        body,
    }])?;
    waiting.close(Outcome::Cancelled, now, reason)
}

/// Why a job was cancelled whose queue was drained.
const DRAINED: &str = "its queue was drained";

/// Cancels all jobs of a queue that wait, for a callback too, and returns how many. Running
/// ones go on.
pub fn drain(queue: &str) -> Result<u64> {
    let mut ids = Vec::new();
    let mut take = |job: jobs::Job| {
        if job.queue == queue && !job.state.is_terminal() && job.state != jobs::State::Running {
            let is_parked = job.state == jobs::State::WaitingExternal;
            ids.push((job.job_id, job.receipt.filter(|_| is_parked)));
        }
        Ok(true)
    };
    for segment in 0..SEGMENTS as u8 {
        jobs::of_segment(segment, Snapshot::Latest, &mut take)?;
    }
    jobs::of_tables(Snapshot::Latest, &mut take)?;
    // In the order of all who take several jobs.
    ids.sort_unstable();
    let (mut waiting, mut deferred) = (0, 0);
    for (job_id, parked) in ids {
        if let Some(receipt) = parked
            && cancel_parked(receipt)?
        {
            waiting += 1;
            continue;
        }
        match seize::seize_waiting(job_id, true)? {
            Some(Seized::Waiting(job)) => {
                cancel_waiting(*job, Some(DRAINED))?;
                waiting += 1;
            }
            Some(Seized::Deferred(row)) => {
                cancel_deferred(*row, Some(DRAINED))?;
                deferred += 1;
            }
            Some(Seized::Own(_)) => return Err(seize::own(job_id)),
            // It was claimed, or came to its end, meanwhile.
            None | Some(Seized::Running(_) | Seized::Finished(_) | Seized::Unknown) => {}
        }
    }
    if deferred > 0 {
        count_cancelled(queue, deferred)?;
    }
    Ok((waiting + deferred) as u64)
}

/// Cancels the job of a parked attempt; false when it is no longer parked.
fn cancel_parked(receipt: i64) -> Result<bool> {
    let hold = close::take(&[receipt], Closer::Operator)?;
    let is_parked = hold.is_parked() && !hold.taken.is_empty();
    if is_parked {
        close::cancel(hold, Some(DRAINED))?;
    } else {
        hold.leave();
    }
    Ok(is_parked)
}

/// The row in `deferred_jobs` is deleted; `count_cancelled` is the caller's.
fn cancel_deferred(row: Deferred, reason: Option<&str>) -> Result<()> {
    let now = xact::micros();
    let from = match row.kind {
        Kind::Scheduled => State::Scheduled,
        Kind::Retryable => State::Retryable,
    };
    let mut body = row.body;
    Switcher::new(Patience::Wait).end(row.job_id, &mut body, from, State::Cancelled)?;
    body.history = history::with_error(body.history, body.attempts, now, reason);
    done::write(&[Done {
        job_id: row.job_id,
        failed: false,
        finalized_at: now,
        attempted_at: None,
        last_receipt: None,
        queue: row.queue,
        priority: row.priority,
        shard: row.shard,
        run_at: row.run_at,
        body,
    }])
}

/// No segment says of jobs in `deferred_jobs` how they ended.
fn count_cancelled(queue: &str, cancelled: i64) -> Result<()> {
    changes::add(&BTreeMap::from([(queue, Change { cancelled, ..Change::default() })]))
}

/// The attempt goes on; its owner learns by heartbeats that it shall stop.
fn ask(hold: Hold, reason: Option<&str>) -> Result<()> {
    let now = xact::micros();
    for item in &hold.taken {
        for placed in body::read(item.segment, &[item.position])? {
            let note = attempts::ask(placed.job_id(), item.receipt, now, reason)?;
            close::decide(&[*item], |_| End::Kept(note.mark()));
        }
    }
    let (db, generation) = hold.origin();
    confirm(db, generation)
}
