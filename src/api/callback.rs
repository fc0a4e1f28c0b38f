//! register_callback, wait_for_callback, complete_external, fail_external, retry_external,
//! resume_external, heartbeat_callback, cancel_callback, callback_result.

use serde_json::Value;

use super::access;
use super::args::{duration, options, required};
use crate::dispatch::external;
use crate::error::{Error, Result};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{Timestamp, Uuid};
use crate::pg::{catalog, xact};
use crate::store::acl::Profile;
use crate::store::history;

sql_function!(awa_register_callback, register);
sql_function!(awa_wait_for_callback, wait);
sql_function!(awa_complete_external, complete);
sql_function!(awa_fail_external, fail);
sql_function!(awa_retry_external, retry);
sql_function!(awa_resume_external, resume);
sql_function!(awa_heartbeat_callback, heartbeat);
sql_function!(awa_cancel_callback, cancel);
sql_function!(awa_callback_result, result);

fn may_work(queue: &str) -> Result<()> {
    access::check(queue, Profile::Worker)
}

fn callback(call: &Call) -> Result<Uuid> {
    required(call.uuid(0), "callback")
}

/// A time-out in microseconds: above zero, and finite.
fn timeout(call: &Call) -> Result<i64> {
    let timeout = required(duration(call.interval(1), "timeout")?, "timeout")?;
    if timeout == 0 {
        return Err(Error::invalid("timeout must be above zero"));
    }
    let at = xact::micros().checked_add(timeout).filter(|at| *at <= Timestamp::LAST);
    at.map(|_| timeout).ok_or_else(|| Error::invalid("timeout must be finite"))
}

fn register(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.register_callback()")?;
    let receipt = required(call.i64(0), "receipt")?;
    let timeout = timeout(call)?;
    options(call.jsonb_value(2).unwrap_or(Value::Null), "opts", &[])?;
    Ok(Returned::value(external::register(receipt, timeout, may_work)?))
}

fn wait(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.wait_for_callback()")?;
    external::wait(required(call.i64(0), "receipt")?, may_work)?;
    Ok(Returned::Void)
}

fn complete(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.complete_external()")?;
    let state = external::complete(&callback(call)?, call.jsonb(1), may_work)?;
    Ok(Returned::Value(catalog::job_state(state)?))
}

fn fail(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.fail_external()")?;
    let error = history::cut(&call.text(1).unwrap_or_default());
    let state = external::fail(&callback(call)?, &error, may_work)?;
    Ok(Returned::Value(catalog::job_state(state)?))
}

fn retry(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.retry_external()")?;
    let state = external::retry(&callback(call)?, may_work)?;
    Ok(Returned::Value(catalog::job_state(state)?))
}

fn resume(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.resume_external()")?;
    Ok(Returned::value(external::resume(&callback(call)?, call.jsonb(1), may_work)?))
}

fn heartbeat(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.heartbeat_callback()")?;
    let (id, timeout) = (callback(call)?, timeout(call)?);
    Ok(Returned::value(Timestamp(external::heartbeat(&id, timeout, may_work)?)))
}

fn cancel(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.cancel_callback()")?;
    Ok(Returned::value(external::cancel(&callback(call)?, may_work)?))
}

fn result(call: &mut Call) -> Result<Returned> {
    if xact::is_in_recovery() {
        return Err(Error::new(
            crate::error::SqlState::READ_ONLY_TRANSACTION,
            "cannot execute awa.callback_result() during recovery",
        ));
    }
    let receipt = required(call.i64(0), "receipt")?;
    Ok(external::result(receipt, may_work)?.map_or(Returned::Null, Returned::Value))
}
