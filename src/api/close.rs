//! complete, complete_many, fail, snooze, release, cancel_attempt, extend.

use super::access;
use super::args::{duration, receipts, required};
use crate::dispatch;
use crate::dispatch::close::{self, Case, Cause, Closer, Hold, Verdict};
use crate::domain::dispatcher::Take;
use crate::error::{Error, Result};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{Timestamp, ToDatum};
use crate::pg::{catalog, random, xact};
use crate::store::acl::Profile;
use crate::store::history;

sql_function!(awa_complete, complete);
sql_function!(awa_complete_many, complete_many);
sql_function!(awa_fail, fail);
sql_function!(awa_snooze, snooze);
sql_function!(awa_release, release);
sql_function!(awa_cancel_attempt, cancel_attempt);
sql_function!(awa_extend, extend);

/// 42501 unless the caller may work on the queues of what it holds.
pub fn check_access(hold: &Hold) -> Result<()> {
    if access::is_master()? {
        return Ok(());
    }
    let mut queues: Vec<u32> = hold.taken.iter().map(|item| item.queue).collect();
    queues.sort_unstable();
    queues.dedup();
    for queue in queues {
        access::check(&dispatch::queue_name(queue), Profile::Worker)?;
    }
    Ok(())
}

/// Takes one receipt, or raises AW001.
fn take_one(receipt: i64) -> Result<Hold> {
    let hold = close::take(&[receipt], Closer::Owner)?;
    if hold.taken.is_empty() {
        return Err(close::stale(receipt));
    }
    check_access(&hold)?;
    Ok(hold)
}

fn complete(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.complete()")?;
    let receipt = required(call.i64(0), "receipt")?;
    let hold = take_one(receipt)?;
    match call.jsonb(1) {
        None => close::complete(hold)?,
        Some(result) => close::complete_with_result(hold, result)?,
    }
    Ok(Returned::Void)
}

fn complete_many(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.complete_many()")?;
    let receipts = receipts(call, 0)?;
    let mut rows = call.rows()?;
    if receipts.is_empty() {
        return Ok(Returned::Void);
    }
    let mut sorted = receipts.clone();
    sorted.sort_unstable();
    let hold = close::take(&sorted, Closer::Owner)?;
    check_access(&hold)?;
    let mut done: Vec<i64> = hold.taken.iter().map(|item| item.receipt).collect();
    done.sort_unstable();
    close::complete(hold)?;
    for receipt in receipts {
        let completed = done.binary_search(&receipt).is_ok();
        rows.push(&[Some(receipt.to_datum()), Some(completed.to_datum())])?;
    }
    Ok(Returned::Void)
}

fn fail(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.fail()")?;
    let receipt = required(call.i64(0), "receipt")?;
    let error = history::cut(&call.text(1).unwrap_or_default());
    let retry_after = duration(call.interval(2), "retry_after")?;
    let terminal = call.bool(3).unwrap_or(false);
    let hold = take_one(receipt)?;
    let (now, random) = (xact::micros(), random::fraction());
    let verdicts = close::conclude(hold, Some(&error), |case: &Case<'_>| {
        if terminal {
            return Verdict::Fail(Cause::Terminal);
        }
        if case.attempt >= case.job.body.max_attempts {
            return Verdict::Fail(Cause::Exhausted);
        }
        let delay = retry_after.unwrap_or_else(|| case.backoff.delay(case.attempt, random));
        Verdict::Retry { due: now.saturating_add(delay) }
    })?;
    let label = match verdicts.first() {
        Some(Verdict::Fail(_)) => "failed",
        Some(Verdict::Cancel) => "cancelled",
        Some(_) => "retryable",
        None => return Err(Error::internal("a failed attempt has no verdict")),
    };
    Ok(Returned::Value(catalog::job_state(label)?))
}

/// The job is scheduled again, however often: a handler that waits uses no attempt.
fn snooze(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.snooze()")?;
    let receipt = required(call.i64(0), "receipt")?;
    let delay = required(duration(call.interval(1), "delay")?, "delay")?;
    let hold = take_one(receipt)?;
    let due = xact::micros().saturating_add(delay);
    close::conclude(hold, None, |_: &Case<'_>| Verdict::Snooze { due })?;
    Ok(Returned::Void)
}

/// Its worker gives the job up for good.
fn cancel_attempt(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.cancel_attempt()")?;
    let receipt = required(call.i64(0), "receipt")?;
    let reason = call.text(1).map(|reason| history::cut(&reason));
    close::cancel(take_one(receipt)?, reason.as_deref())?;
    Ok(Returned::Void)
}

fn release(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.release()")?;
    let mut receipts = receipts(call, 0)?;
    if receipts.is_empty() {
        return Ok(Returned::value(0_i64));
    }
    receipts.sort_unstable();
    let hold = close::take(&receipts, Closer::Owner)?;
    check_access(&hold)?;
    Ok(Returned::value(close::give_back(hold)? as i64))
}

fn extend(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.extend()")?;
    let receipts = receipts(call, 0)?;
    let by = required(duration(call.interval(1), "by")?, "by")?;
    let mut rows = call.rows()?;
    let now = xact::micros();
    let master = access::is_master()?;
    for receipt in receipts {
        let moved = loop {
            let queue = dispatch::with_open(|d, db| d.queue_of(db, receipt))?;
            if let Some(queue) = queue
                && !master
            {
                access::check(&dispatch::queue_name(queue), Profile::Worker)?;
            }
            let xid = xact::top_xid_if_any().unwrap_or_default();
            let moved = dispatch::with_open(|d, db| {
                dispatch::with_log(|log| d.extend(db, receipt, (by, now), xid, log))
            })?;
            match moved {
                Ok(deadline) => break Some(deadline),
                // Somebody claims or closes it: what comes of that decides.
                Err(Take::Busy(xid)) if !xact::is_current(xid) => xact::wait_for_xid(xid),
                Err(_) => break None,
            }
        };
        if let Some(deadline) = moved {
            let deadline = (deadline != i64::MAX).then(|| Timestamp(deadline).to_datum());
            rows.push(&[Some(receipt.to_datum()), deadline])?;
        }
    }
    Ok(Returned::Void)
}
