//! claim, claim_from, complete_and_claim, wait_for_jobs.

use std::cell::Cell;

use super::access;
use super::args::{self, duration, required};
use crate::dispatch;
use crate::dispatch::claim::{self, Claimed, Outcome, Wanted};
use crate::dispatch::close::{self, Closer};
use crate::dispatch::wait::{self, Waking};
use crate::error::{Error, Result, SqlState};
use crate::pg::call::{Call, Returned, Rows, sql_function};
use crate::pg::datum::{Datum, Timestamp, ToDatum};
use crate::pg::{guc, procedure, xact};
use crate::store::acl::Profile;
use crate::store::history;

sql_function!(awa_claim, claim_one);
sql_function!(awa_claim_from, claim_from);
sql_function!(awa_complete_and_claim, complete_and_claim);
sql_function!(awa_wait_for_jobs, wait_for_jobs);
sql_function!(awa_claim_outcome, claim_outcome);

const MAX_JOBS: i32 = 10_000;

thread_local! {
    static LAST: Cell<Option<Outcome>> = const { Cell::new(None) };
}

fn claim_one(call: &mut Call) -> Result<Returned> {
    let queues = vec![args::queue(call, 0)?];
    let wait = duration(call.interval(4), "wait")?.unwrap_or(0);
    no_options(call, 5)?;
    run(call, queues, (1, 2, 3), wait)
}

fn claim_from(call: &mut Call) -> Result<Returned> {
    let queues = args::queues(call, 0)?;
    let wait = duration(call.interval(4), "wait")?.unwrap_or(0);
    no_options(call, 5)?;
    run(call, queues, (1, 2, 3), wait)
}

fn no_options(call: &Call, i: usize) -> Result<()> {
    let value = call.jsonb_value(i).unwrap_or(serde_json::Value::Null);
    args::options(value, "opts", &[]).map(|_| ())
}

fn complete_and_claim(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.complete_and_claim()")?;
    let mut receipts = args::receipts(call, 0)?;
    receipts.sort_unstable();
    let queues = vec![args::queue(call, 1)?];
    access::check_all(&queues, Profile::Worker)?;
    if !receipts.is_empty() {
        let hold = close::take(&receipts, Closer::Owner)?;
        super::close::check_access(&hold)?;
        close::complete(hold)?;
    }
    run(call, queues, (2, 3, 4), 0)
}

/// What a claim asks for, from the arguments max_jobs, runtime and deadline.
fn run(
    call: &mut Call,
    queues: Vec<String>,
    (max_jobs, runtime, deadline): (usize, usize, usize),
    wait: i64,
) -> Result<Returned> {
    xact::ensure_writable("awa.claim()")?;
    let max_jobs = call.i32(max_jobs).unwrap_or(1);
    if !(0..=MAX_JOBS).contains(&max_jobs) {
        return Err(Error::invalid(format!("max_jobs must be between 0 and {MAX_JOBS}")));
    }
    let runtime = call.uuid(runtime);
    let deadline = duration(call.interval(deadline), "deadline")?;
    if deadline == Some(0) && runtime.is_none() {
        return Err(Error::invalid("a claim without a deadline needs a runtime").hint(
            "Register a runtime, or give a deadline: nothing else would end a lost attempt.",
        ));
    }
    access::check_all(&queues, Profile::Worker)?;
    let mut rows = call.rows()?;
    let wanted = Wanted { queues: &queues, max_jobs: max_jobs as usize, runtime, deadline };
    let until = xact::micros().saturating_add(wait.min(guc::claim_wait_max().as_micros() as i64));
    let mut ended_some = false;
    loop {
        let mut outcome = claim::look(&wanted)?;
        if outcome == Outcome::Claimed && max_jobs > 0 {
            // What could not run any more is out of the way: look at once again.
            let Some(claimed) = claim::claim(&wanted)? else {
                ended_some = true;
                continue;
            };
            if !claimed.is_empty() {
                wait::done();
                LAST.set(Some(Outcome::Claimed));
                return deliver(&claimed, &mut rows);
            }
            // Others were faster, or what is left has to wait for its turn.
            outcome = claim::look(&wanted)?;
        }
        LAST.set(Some(if outcome == Outcome::Claimed { Outcome::Empty } else { outcome }));
        // Jobs that this transaction has ended have their turns until it commits.
        let waits_for_itself = ended_some && outcome == Outcome::Limited;
        let is_over = xact::micros() >= until || queues.is_empty() || max_jobs == 0;
        if is_over || waits_for_itself || wait::wait(&queues, until, runtime)? == Waking::Asked {
            dispatch::leave_wait();
            return Ok(Returned::Void);
        }
    }
}

fn deliver(claimed: &[Claimed], rows: &mut Rows) -> Result<Returned> {
    for attempt in claimed {
        let Claimed { job, .. } = attempt;
        let body = &job.body;
        rows.push(&[
            Some(attempt.receipt.to_datum()),
            Some(job.job_id().to_datum()),
            Some(body.kind),
            Some(attempt.queue.as_str().to_datum()),
            Some(i16::from(attempt.priority).to_datum()),
            Some(attempt.attempt.to_datum()),
            Some(body.max_attempts.to_datum()),
            Some(body.args),
            body.metadata,
            body.tags,
            history::progress(body.history).map(|progress| progress.to_datum()),
            Some(Timestamp(body.run_at()).to_datum()),
            Some(Timestamp(body.created_at).to_datum()),
            deadline(attempt.deadline),
        ])?;
    }
    Ok(Returned::Void)
}

fn deadline(at: i64) -> Option<Datum> {
    (at != i64::MAX).then(|| Timestamp(at).to_datum())
}

fn claim_outcome(_call: &mut Call) -> Result<Returned> {
    Ok(Returned::optional(LAST.get().map(|outcome| match outcome {
        Outcome::Claimed => "claimed",
        Outcome::Empty => "empty",
        Outcome::Paused => "paused",
        Outcome::Limited => "limited",
    })))
}

fn wait_for_jobs(call: &mut Call) -> Result<Returned> {
    let queues = args::queues(call, 0)?;
    let timeout = required(duration(call.interval(1), "timeout")?, "timeout")?;
    access::check_all(&queues, Profile::Worker)?;
    if xact::is_in_recovery() {
        return Err(Error::new(
            SqlState::READ_ONLY_TRANSACTION,
            "cannot wait for jobs during recovery",
        ));
    }
    let atomic = procedure::is_atomic(call);
    // Outside BEGIN it commits, which must not be done to what a procedure wrote before.
    if xact::top_xid_if_any().is_some() {
        return Err(Error::new(
            SqlState::ACTIVE_TRANSACTION,
            "awa.wait_for_jobs() cannot be called in a transaction that has written",
        )
        .hint("Commit first, or use awa.claim() with wait."));
    }
    let timeout = if atomic {
        // Inside BEGIN it cannot commit, so it holds the transaction's snapshot.
        timeout.min(guc::claim_wait_max().as_micros() as i64)
    } else {
        timeout
    };
    // The first use of a database takes numbers from a sequence, which needs an xid: not in
    // the transaction that waits.
    wait::prepare(&queues)?;
    let until = xact::micros().saturating_add(timeout);
    let available = procedure::without_snapshot(atomic, || {
        loop {
            if wait::is_available(&queues)? {
                return Ok(true);
            }
            if xact::micros() >= until {
                return Ok(false);
            }
            if queues.is_empty() {
                wait::idle(until)?;
            } else if wait::wait(&queues, until, None)? == Waking::Asked {
                return Ok(false);
            }
        }
    })?;
    procedure::returned(call, &[Some(available.to_datum())])
}
