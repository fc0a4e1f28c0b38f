//! Attempts that are lost: their owner is gone, or their deadline has passed.

use core::cell::Cell;
use core::time::Duration;

use super::{Context, StepReport};
use crate::dispatch;
use crate::dispatch::close::{self, Case, Closer, Verdict};
use crate::error::Result;
use crate::pg::{guc, random, xact};

/// A lost attempt that cannot be closed now is looked at again after this, microseconds.
const AGAIN: i64 = 1_000_000;

/// Orphans whose unique keys open transactions hold stay orphans, which asks for the next
/// pass at once: a pass that found no others is followed by this pause, microseconds.
const PAUSE: i64 = 200_000;

thread_local! {
    static UNDECIDED_UNTIL: Cell<i64> = const { Cell::new(i64::MIN) };
}

/// Declares silent heartbeat runtimes dead.
pub fn fence_silent(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let now = xact::micros();
    let fenced =
        if dispatch::is_open(db) { dispatch::with(|d| d.fence_silent(db, now)) } else { 0 };
    Ok(StepReport { did: fenced as u64, next: None })
}

/// Gives the open attempts of dead runtimes to others.
pub fn rescue_orphans(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let limit = guc::rescue_batch_size();
    let mut receipts = Vec::with_capacity(limit);
    if dispatch::is_open(db) && xact::micros() >= UNDECIDED_UNTIL.get() {
        dispatch::with(|d| d.orphaned(db, limit, &mut receipts));
    }
    let rescued = rescue(receipts, "owner is gone: worker presumed dead")?;
    report(rescued, limit)
}

/// Ends attempts whose deadline has passed.
pub fn rescue_expired(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let limit = guc::rescue_batch_size();
    let now = xact::micros();
    let mut receipts = Vec::with_capacity(limit);
    if dispatch::is_open(db) {
        dispatch::with(|d| d.expired(db, now, limit, AGAIN, &mut receipts));
    }
    let rescued = rescue(receipts, "hard deadline exceeded")?;
    report(rescued, limit)
}

fn report(rescued: u64, limit: usize) -> Result<StepReport> {
    let next = if rescued as usize >= limit { Duration::ZERO } else { guc::rescue_interval() };
    Ok(StepReport { did: rescued, next: Some(next) })
}

/// A rescue counts as an attempt: the job is tried again after its backoff, or has failed.
fn rescue(mut receipts: Vec<i64>, reason: &str) -> Result<u64> {
    if receipts.is_empty() {
        return Ok(0);
    }
    receipts.sort_unstable();
    let hold = close::take(&receipts, Closer::Rescue)?;
    let (now, random) = (xact::micros(), random::fraction());
    let verdicts = close::conclude(hold, Some(reason), |case: &Case<'_>| {
        if case.attempt >= case.job.body.max_attempts {
            Verdict::Fail
        } else {
            Verdict::Retry { due: now.saturating_add(case.backoff.delay(case.attempt, random)) }
        }
    })?;
    let rescued = verdicts.iter().filter(|verdict| **verdict != Verdict::Skip).count();
    if rescued == 0 && !verdicts.is_empty() {
        UNDECIDED_UNTIL.set(now.saturating_add(PAUSE));
    }
    Ok(rescued as u64)
}
