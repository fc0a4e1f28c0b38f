//! Attempts that are lost: their owner is gone, their deadline has passed, or the callback
//! that they wait for does not come.

use core::cell::Cell;
use core::time::Duration;

use super::{Context, StepReport};
use crate::dispatch;
use crate::dispatch::close::{self, Case, Cause, Closer, Verdict};
use crate::domain::entities::Db;
use crate::domain::rescue::{Kind, Limits, Pass, PassEnd};
use crate::error::{Error, Result};
use crate::pg::{guc, log, random, xact};

/// A lost attempt that cannot be closed now is looked at again after this, microseconds.
const AGAIN: i64 = 1_000_000;

/// One that cannot be closed although others can is looked at again after this, microseconds.
const ASIDE: i64 = 60_000_000;

/// When so many of a batch fail one by one, the fault is not theirs.
const MOST_ASIDE: usize = 16;

/// A pass that could close nothing of what it found is followed by this pause, microseconds.
const PAUSE: i64 = 200_000;

thread_local! {
    /// The worker's passes that go on, by kind.
    static PASSES: Cell<[Option<Pass>; 3]> = const { Cell::new([None; 3]) };
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
pub fn rescue_orphans(context: &Context) -> Result<StepReport> {
    step(context, Kind::Owner)
}

/// Ends attempts whose deadline has passed.
pub fn rescue_expired(context: &Context) -> Result<StepReport> {
    step(context, Kind::Deadline)
}

/// Ends parked attempts whose callbacks have timed out.
pub fn rescue_callbacks(context: &Context) -> Result<StepReport> {
    step(context, Kind::Callback)
}

/// What the settings allow a pass.
pub fn limits() -> Limits {
    Limits {
        batch: guc::rescue_batch_size() as u64,
        budget: guc::rescue_pass_budget().as_micros() as i64,
        max_rows: guc::rescue_pass_max_rows() as u64,
        interval: guc::rescue_interval().as_micros() as i64,
    }
}

/// The next batch of the worker's pass, in a transaction of its own; by hand, a whole pass.
fn step(context: &Context, kind: Kind) -> Result<StepReport> {
    let db = dispatch::attach()?;
    if !dispatch::is_open(db) {
        return Ok(StepReport { did: 0, next: None });
    }
    let limits = limits();
    if context.forced {
        let (rescued, _) = run_pass(db, kind, &limits)?;
        return Ok(StepReport { did: rescued, next: None });
    }
    let now = xact::micros();
    let rest = rest_of(db, kind);
    // A clock that was set back makes no rest longer.
    if now < rest && rest.abs_diff(now) <= limits.interval.max(ASIDE + AGAIN) as u64 {
        return Ok(StepReport { did: 0, next: Some(Duration::from_micros(rest.abs_diff(now))) });
    }
    let mut passes = PASSES.get();
    let mut pass = passes[kind as usize].take().unwrap_or(Pass::begin(now));
    // A batch that fails ends the pass.
    PASSES.set(passes);
    let asked = pass.batch(&limits);
    let batch = rescue_batch(db, kind, asked)?;
    pass.rescued += batch.rescued;
    let now = xact::micros();
    match pass.end(batch.found, asked, now, &limits) {
        None => {
            passes[kind as usize] = Some(pass);
            PASSES.set(passes);
            Ok(StepReport { did: batch.rescued, next: Some(Duration::ZERO) })
        }
        Some(end) => {
            let is_stuck = batch.found > 0 && batch.rescued == 0;
            let pause = if is_stuck { now.saturating_add(PAUSE) } else { 0 };
            let rest = pass.rest(end, now, &limits).max(pause);
            report(db, kind, &pass, end, Some(rest));
            let rest = rest.max(rest_of(db, kind));
            let next = if rest > now {
                Duration::from_micros(rest.abs_diff(now))
            } else {
                guc::rescue_interval()
            };
            Ok(StepReport { did: batch.rescued, next: Some(next) })
        }
    }
}

fn rest_of(db: Db, kind: Kind) -> i64 {
    dispatch::with(|d| d.base(db).rescues[kind as usize].rest)
}

fn report(db: Db, kind: Kind, pass: &Pass, end: PassEnd, rest: Option<i64>) {
    dispatch::with(|d| {
        let passes = &mut d.base(db).rescues[kind as usize];
        if pass.rescued > 0 || end != PassEnd::Drained {
            passes.sizes[end as usize].add(pass.rescued);
        }
        // One that is over is as good as none.
        if let Some(rest) = rest.filter(|rest| *rest > 0) {
            passes.rest = rest;
        }
    });
}

/// A whole pass in this transaction: how many it rescued, and why it ended.
pub fn run_pass(db: Db, kind: Kind, limits: &Limits) -> Result<(u64, PassEnd)> {
    let mut pass = Pass::begin(xact::micros());
    loop {
        let asked = pass.batch(limits);
        let batch = rescue_batch(db, kind, asked)?;
        pass.rescued += batch.rescued;
        if let Some(end) = pass.end(batch.found, asked, xact::micros(), limits) {
            report(db, kind, &pass, end, None);
            return Ok((pass.rescued, end));
        }
    }
}

struct Batch {
    found: u64,
    rescued: u64,
}

fn rescue_batch(db: Db, kind: Kind, asked: u64) -> Result<Batch> {
    let limit = usize::try_from(asked).unwrap_or(usize::MAX);
    let now = xact::micros();
    let mut receipts = Vec::with_capacity(limit);
    dispatch::with(|d| match kind {
        Kind::Owner => d.orphaned(db, now, limit, &mut receipts),
        Kind::Deadline => d.expired(db, now, limit, AGAIN, &mut receipts),
        Kind::Callback => d.overdue(db, now, limit, AGAIN, &mut receipts),
    });
    let found = receipts.len();
    receipts.sort_unstable();
    let mut aside = Vec::new();
    let rescued = rescue_most(&receipts, kind, &mut aside);
    // Also when the others fail: the next batch does without these.
    for receipt in &aside {
        dispatch::with(|d| d.set_aside(db, *receipt, now.saturating_add(ASIDE)));
    }
    Ok(Batch { found: found as u64, rescued: rescued? })
}

fn reason(kind: Kind) -> &'static str {
    match kind {
        Kind::Owner => "owner is gone: worker presumed dead",
        Kind::Deadline => "hard deadline exceeded",
        Kind::Callback => "callback timed out",
    }
}

/// Rescues all of them but those that fail alone too, which go to `aside`.
fn rescue_most(receipts: &[i64], kind: Kind, aside: &mut Vec<i64>) -> Result<u64> {
    if receipts.is_empty() {
        return Ok(0);
    }
    let error = match xact::attempt(|| rescue(receipts, kind)) {
        Ok(rescued) => return Ok(rescued),
        Err(error) => error,
    };
    if !may_be_of_a_row(&error) || aside.len() >= MOST_ASIDE {
        return Err(error);
    }
    if let [receipt] = receipts {
        log::warning(&format!(
            "awa: attempt {receipt} cannot be rescued and is set aside: {}",
            error.message
        ));
        aside.push(*receipt);
        return Ok(0);
    }
    let (first, second) = receipts.split_at(receipts.len() / 2);
    Ok(rescue_most(first, kind, aside)? + rescue_most(second, kind, aside)?)
}

/// Whether the error can come from what one job is, rather than from the state of the server:
/// not lack of resources (53), a conflict (40, 55P03), an interruption (57), or a replay.
fn may_be_of_a_row(error: &Error) -> bool {
    let code = error.code.as_str();
    !["40", "53", "57", "AW"].iter().any(|class| code.starts_with(class)) && code != "55P03"
}

/// A rescue counts as an attempt: the job is tried again after its backoff, or has failed.
fn rescue(receipts: &[i64], kind: Kind) -> Result<u64> {
    let (now, random) = (xact::micros(), random::fraction());
    let (closer, cause) = match kind {
        Kind::Callback => (Closer::Overdue(now), Cause::CallbackTimeout),
        Kind::Owner | Kind::Deadline => (Closer::Rescue, Cause::Exhausted),
    };
    let hold = close::take(receipts, closer)?;
    let verdicts = close::conclude(hold, Some(reason(kind)), |case: &Case<'_>| {
        if case.attempt >= case.job.body.max_attempts {
            Verdict::Fail(cause)
        } else {
            Verdict::Retry { due: now.saturating_add(case.backoff.delay(case.attempt, random)) }
        }
    })?;
    Ok(verdicts.iter().filter(|verdict| **verdict != Verdict::Skip).count() as u64)
}
