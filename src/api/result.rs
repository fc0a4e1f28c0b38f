//! get_result: what a job came to, for who waits for it.

use super::access;
use super::args::{duration, required};
use crate::dispatch;
use crate::error::Result;
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{Json, ToDatum};
use crate::pg::snapshot::Snapshot;
use crate::pg::{guc, latch, xact};
use crate::store::acl::Profile;
use crate::store::jobs;

sql_function!(awa_get_result, get_result);

/// Between two looks whether anything has happened in the database, milliseconds.
const FIRST_PAUSE: u64 = 2;
const LONGEST_PAUSE: u64 = 20;

/// NULL: no such job, no end yet, or an end without a result.
fn get_result(call: &mut Call) -> Result<Returned> {
    let job_id = required(call.i64(0), "job_id")?;
    let wait = duration(call.interval(1), "wait")?.unwrap_or(0);
    let until = xact::micros().saturating_add(wait.min(guc::claim_wait_max().as_micros() as i64));
    let mut pause = FIRST_PAUSE;
    let mut checked = false;
    loop {
        // Before the look: what happens during it is looked at once more.
        let seen = changes()?;
        let Some(job) = jobs::find(job_id, Snapshot::Latest)? else { return Ok(Returned::Null) };
        if !checked && !access::may(&job.queue, Profile::Reader)? {
            access::check(&job.queue, Profile::Producer)?;
        }
        checked = true;
        if job.state.is_terminal() {
            return Ok(job
                .result
                .map_or(Returned::Null, |result| Returned::Value(Json(&result).to_datum())));
        }
        loop {
            if xact::micros() >= until || latch::client_is_gone() {
                return Ok(Returned::Null);
            }
            latch::wait(pause);
            pause = (pause * 2).min(LONGEST_PAUSE);
            // A look reads a segment: not while nothing moves.
            if seen.is_none() || changes()? != seen {
                break;
            }
        }
    }
}

/// How often memory has changed; None on a standby, which has none.
fn changes() -> Result<Option<u64>> {
    if xact::is_in_recovery() {
        return Ok(None);
    }
    let db = dispatch::attach()?;
    Ok(Some(dispatch::with(|d| d.base(db).changes)))
}
