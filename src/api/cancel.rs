//! cancel_job, cancel_by_unique_key, cancel_requested.

use super::access;
use super::args::{receipts, required};
use crate::dispatch;
use crate::dispatch::cancel;
use crate::error::{Error, Result, SqlState};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::ToDatum;
use crate::pg::{catalog, xact};
use crate::store::acl::Profile;
use crate::store::{history, unique};

sql_function!(awa_cancel_job, cancel_job);
sql_function!(awa_cancel_by_unique_key, cancel_by_unique_key);
sql_function!(awa_cancel_requested, cancel_requested);

fn may_cancel(queue: &str) -> Result<()> {
    access::check(queue, Profile::Operator)
}

fn cancel_job(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.cancel_job()")?;
    let job_id = required(call.i64(0), "job_id")?;
    let reason = call.text(1).map(|reason| history::cut(&reason));
    let force = call.bool(2).unwrap_or(false);
    let state = cancel::cancel(job_id, reason.as_deref(), force, may_cancel)?;
    Ok(Returned::Value(catalog::job_state(state)?))
}

/// Whoever holds the key now: a job that has come to its end meanwhile has lost it.
fn cancel_by_unique_key(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.cancel_by_unique_key()")?;
    let key = required(call.text(0), "unique_key")?;
    let Some(job_id) = unique::holder(key.as_bytes())? else {
        return Ok(Returned::optional(None::<i64>));
    };
    match cancel::cancel(job_id, None, false, may_cancel) {
        Ok(_) => Ok(Returned::value(job_id)),
        Err(error) if error.code == SqlState::NOT_FOUND => Ok(Returned::optional(None::<i64>)),
        Err(error) => Err(error),
    }
}

fn cancel_requested(call: &mut Call) -> Result<Returned> {
    if xact::is_in_recovery() {
        return Err(Error::new(
            SqlState::READ_ONLY_TRANSACTION,
            "cannot execute awa.cancel_requested() during recovery",
        ));
    }
    let receipts = receipts(call, 0)?;
    let mut rows = call.rows()?;
    let master = access::is_master()?;
    for receipt in receipts {
        let queue = dispatch::with_open(|d, db| {
            d.is_asked(db, receipt).then(|| d.queue_of(db, receipt)).flatten()
        })?;
        let Some(queue) = queue else { continue };
        if !master {
            access::check(&dispatch::queue_name(queue), Profile::Worker)?;
        }
        rows.push(&[Some(receipt.to_datum())])?;
    }
    Ok(Returned::Void)
}
