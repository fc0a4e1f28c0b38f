//! Jobs whose time has come: from `deferred_jobs`, and from timers.

use core::time::Duration;
use std::collections::BTreeMap;

use super::{Context, StepReport};
use crate::dispatch;
use crate::dispatch::enqueue::{self, Promoted};
use crate::dispatch::keys::{self, Patience, Switched, Switcher};
use crate::domain::undo::Act;
use crate::domain::unique::State;
use crate::error::Result;
use crate::pg::debug_point::debug_point;
use crate::pg::{guc, xact};
use crate::store::body::Body;
use crate::store::changes::{self, Change};
use crate::store::deferred::{self, Deferred, Due, Kind};
use crate::store::done::{self, Done};
use crate::store::history;

const RELEASES: usize = 4096;

/// Makes released jobs ready whose backoff is over.
pub fn return_released(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let now = xact::micros();
    let more = dispatch::is_open(db) && dispatch::with(|d| d.return_due(db, now, RELEASES));
    Ok(StepReport { did: 0, next: more.then_some(Duration::ZERO) })
}

/// How long a job waits that an open transaction holds, or its unique key, microseconds.
const AGAIN: i64 = 1_000_000;

/// The unique keys of jobs that become available. A job that lost its key to another one is
/// cancelled; one whose key is undecided waits, and none of the others with it.
struct PromotedKeys {
    now: i64,
    switcher: Switcher,
    lost: Vec<(bool, Done)>,
    undecided: Vec<Deferred>,
}

impl PromotedKeys {
    fn new(now: i64) -> Self {
        let switcher = Switcher::new(Patience::Skip);
        Self { now, switcher, lost: Vec::new(), undecided: Vec::new() }
    }

    /// The job back, if it may go on.
    fn switch(&mut self, mut job: Deferred) -> Result<Option<Deferred>> {
        if job.body.expires_at.is_some_and(|at| at <= self.now) && job.body.attempts == 0 {
            return self.expire(job);
        }
        let from = match job.kind {
            Kind::Scheduled => State::Scheduled,
            Kind::Retryable => State::Retryable,
        };
        match self.switcher.switch(job.job_id, &job.body, from, State::Available)? {
            Switched::Done => return Ok(Some(job)),
            Switched::Lost(holder) => {
                // It did not hold its key, so this cannot free it, only take or not take it.
                let mut body = job.body;
                if self.switcher.end(job.job_id, &mut body, from, State::Cancelled)? {
                    self.cancel(job, body, &keys::reason(holder));
                    return Ok(None);
                }
            }
            Switched::Busy => {}
        }
        job.run_at = self.now + AGAIN;
        self.undecided.push(job);
        Ok(None)
    }

    /// Nobody has claimed the job in time. None, or back for a while.
    fn expire(&mut self, mut job: Deferred) -> Result<Option<Deferred>> {
        let from = match job.kind {
            Kind::Scheduled => State::Scheduled,
            Kind::Retryable => State::Retryable,
        };
        let mut body = job.body;
        if self.switcher.end(job.job_id, &mut body, from, State::Cancelled)? {
            self.cancel(job, body, keys::EXPIRED);
        } else {
            job.run_at = self.now + AGAIN;
            self.undecided.push(job);
        }
        Ok(None)
    }

    fn cancel(&mut self, job: Deferred, mut body: Body, reason: &str) {
        body.history = history::with_error(body.history, body.attempts, self.now, Some(reason));
        let done = Done {
            job_id: job.job_id,
            failed: false,
            finalized_at: self.now,
            attempted_at: None,
            last_receipt: None,
            queue: job.queue,
            priority: job.priority,
            shard: job.shard,
            run_at: job.run_at,
            body,
        };
        self.lost.push((job.kind == Kind::Retryable, done));
    }

    fn finish(self, db: dispatch::Slot) -> Result<()> {
        if !self.undecided.is_empty() {
            // They were counted when they were put aside first.
            deferred::write(&self.undecided)?;
        }
        if self.lost.is_empty() {
            return Ok(());
        }
        let mut taken: BTreeMap<(String, bool), i32> = BTreeMap::new();
        let mut changes: BTreeMap<&str, Change> = BTreeMap::new();
        let mut rows = Vec::with_capacity(self.lost.len());
        for (retryable, done) in &self.lost {
            *taken.entry((done.queue.clone(), *retryable)).or_default() += 1;
            changes.entry(&done.queue).or_default().cancelled += 1;
        }
        changes::add(&changes)?;
        rows.extend(self.lost.into_iter().map(|(_, done)| done));
        done::write(&rows)?;
        dispatch::reserve_log(taken.len())?;
        let subxact = xact::current_subxact();
        dispatch::with(|d| {
            for ((queue, retryable), count) in &taken {
                let queue = d.ensure_queue(db, queue)?;
                let act = Act::Defer { queue, retryable: *retryable, count: -count, due: i64::MAX };
                dispatch::log_written(d, db, subxact, act);
            }
            Ok(())
        })
        .map_err(dispatch::capacity)
    }
}

/// Moves due jobs into their lanes.
pub fn promote_due(context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    // From the deletion on: a rebuild counts either all of it or nothing.
    dispatch::begin_write(db)?;
    if !dispatch::is_open(db) {
        dispatch::end_write();
        return Ok(StepReport { did: 0, next: None });
    }
    // What is deferred from here on by others lowers this again.
    // By hand, the transaction may roll back: what the worker knows stays as it is.
    if !context.forced {
        dispatch::with(|d| d.base(db).next_deferred = i64::MAX);
    }
    let now = xact::micros();
    let limit = guc::promote_batch_size();
    let Due { jobs: due, any_held } = deferred::read_due(now, limit)?;
    let ids: Vec<i64> = due.iter().map(|job| job.job_id).collect();
    let mut taken = deferred::take(&ids)?;
    debug_point!("promote_taken", interruptible);
    taken.sort_unstable();
    let mut ready: BTreeMap<String, Vec<Promoted>> = BTreeMap::new();
    let mut counts: BTreeMap<(String, bool), i32> = BTreeMap::new();
    let mut did = 0;
    let mut keys = PromotedKeys::new(now);
    for job in due {
        // Cancelled, or promoted by somebody else, meanwhile.
        if taken.binary_search(&job.job_id).is_err() {
            continue;
        }
        did += 1;
        let Some(job) = keys.switch(job)? else { continue };
        *counts.entry((job.queue.clone(), job.kind == Kind::Retryable)).or_default() += 1;
        let mut body = job.body;
        body.run_at = Some(job.run_at);
        ready.entry(job.queue).or_default().push(Promoted {
            job_id: job.job_id,
            priority: job.priority,
            shard: job.shard,
            body,
        });
    }
    for (queue, jobs) in ready {
        enqueue::promote(&queue, jobs)?;
    }
    keys.finish(db)?;
    dispatch::reserve_log(counts.len())?;
    let subxact = xact::current_subxact();
    dispatch::with(|d| {
        for ((queue, retryable), count) in &counts {
            let queue = d.ensure_queue(db, queue)?;
            let act = Act::Defer { queue, retryable: *retryable, count: -count, due: i64::MAX };
            dispatch::log_written(d, db, subxact, act);
        }
        Ok(())
    })
    .map_err(dispatch::capacity)?;
    dispatch::end_write();
    let mut next = deferred::next_run_at()?.unwrap_or(i64::MAX);
    if any_held {
        // Whoever holds them may let them go.
        next = next.min(now + AGAIN);
    }
    dispatch::with(|d| {
        let known = d.base(db).next_deferred;
        d.base(db).next_deferred = known.min(next);
    });
    let wait = (next != i64::MAX).then(|| Duration::from_micros((next - now).max(0) as u64));
    Ok(StepReport { did, next: wait })
}
