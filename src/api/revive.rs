//! retry_job, delete_job, retry_failed, discard_failed.

use super::access;
use super::args::required;
use crate::dispatch::revive;
use crate::error::Result;
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::{catalog, datum, xact};
use crate::store::acl::Profile;
use crate::store::done::Done;

sql_function!(awa_retry_job, retry_job);
sql_function!(awa_delete_job, delete_job);
sql_function!(awa_retry_failed, retry_failed);
sql_function!(awa_discard_failed, discard_failed);

fn may_operate(queue: &str) -> Result<()> {
    access::check(queue, Profile::Operator)
}

fn retry_job(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.retry_job()")?;
    let state = revive::retry(required(call.i64(0), "job_id")?, may_operate)?;
    Ok(Returned::Value(catalog::job_state(state)?))
}

fn delete_job(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.delete_job()")?;
    revive::delete(required(call.i64(0), "job_id")?, may_operate)?;
    Ok(Returned::value(true))
}

/// Which failed jobs the arguments name. A queue that is named must be the caller's; of all
/// queues only the caller's are meant.
fn named(call: &Call) -> Result<impl Fn(&Done) -> Result<bool>> {
    let (queue, kind) = (call.text(0), call.text(1));
    if let Some(queue) = &queue {
        may_operate(queue)?;
    }
    Ok(move |row: &Done| {
        let of_kind = kind.as_ref().is_none_or(|kind| *kind == datum::own_text(row.body.kind));
        match &queue {
            Some(queue) => Ok(of_kind && *queue == row.queue),
            None => Ok(of_kind && access::may(&row.queue, Profile::Operator)?),
        }
    })
}

fn retry_failed(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.retry_failed()")?;
    let named = named(call)?;
    Ok(Returned::value(revive::retry_failed(named)? as i64))
}

fn discard_failed(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.discard_failed()")?;
    let named = named(call)?;
    Ok(Returned::value(revive::discard_failed(named)? as i64))
}
