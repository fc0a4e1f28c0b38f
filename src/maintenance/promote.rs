//! Jobs whose time has come: from `deferred_jobs`, and from timers.

use core::time::Duration;
use std::collections::BTreeMap;

use super::{Context, StepReport};
use crate::dispatch;
use crate::dispatch::enqueue::{self, Promoted};
use crate::domain::undo::Act;
use crate::error::Result;
use crate::pg::{guc, xact};
use crate::store::deferred::{self, Kind};

const RELEASES: usize = 4096;

/// Makes released jobs ready whose backoff is over.
pub fn return_released(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let now = xact::micros();
    let more = dispatch::is_open(db) && dispatch::with(|d| d.return_due(db, now, RELEASES));
    Ok(StepReport { did: 0, next: more.then_some(Duration::ZERO) })
}

/// Moves due jobs into their lanes.
pub fn promote_due(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    if !dispatch::is_open(db) {
        return Ok(StepReport { did: 0, next: None });
    }
    // What is deferred from here on by others lowers this again.
    dispatch::with(|d| d.base(db).next_deferred = i64::MAX);
    let now = xact::micros();
    let limit = guc::promote_batch_size();
    let due = deferred::read_due(now, limit)?;
    let ids: Vec<i64> = due.iter().map(|job| job.job_id).collect();
    let mut taken = deferred::delete(&ids)?;
    taken.sort_unstable();
    let mut queues: BTreeMap<String, Vec<Promoted>> = BTreeMap::new();
    let mut counts: BTreeMap<(String, bool), i32> = BTreeMap::new();
    let mut did = 0;
    for job in due {
        // Cancelled, or promoted by somebody else, meanwhile.
        if taken.binary_search(&job.job_id).is_err() {
            continue;
        }
        did += 1;
        *counts.entry((job.queue.clone(), job.kind == Kind::Retryable)).or_default() += 1;
        let mut body = job.body;
        body.run_at = Some(job.run_at);
        queues.entry(job.queue).or_default().push(Promoted {
            job_id: job.job_id,
            priority: job.priority,
            shard: job.shard,
            body,
        });
    }
    for (queue, jobs) in queues {
        enqueue::promote(&queue, jobs)?;
    }
    dispatch::reserve_log(counts.len())?;
    let subxact = xact::current_subxact();
    dispatch::with(|d| {
        for ((queue, retryable), count) in &counts {
            let queue = d.ensure_queue(db, queue)?;
            let act = Act::Defer { queue, retryable: *retryable, count: -count, due: i64::MAX };
            dispatch::log_act(d, db, subxact, act);
        }
        Ok(())
    })
    .map_err(dispatch::capacity)?;
    let next = deferred::next_run_at()?.unwrap_or(i64::MAX);
    dispatch::with(|d| {
        let known = d.base(db).next_deferred;
        d.base(db).next_deferred = known.min(next);
    });
    let wait = (next != i64::MAX).then(|| Duration::from_micros((next - now).max(0) as u64));
    Ok(StepReport { did, next: wait })
}
