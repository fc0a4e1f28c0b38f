//! The view `awa.dlq`, dlq_retry, dlq_retry_many, dlq_purge, dlq_move.

use serde_json::Value;

use super::access;
use super::args::{check_name, options, required};
use super::filter::Filter;
use super::jobs::Gate;
use crate::dispatch::enqueue::check_priority;
use crate::dispatch::revive::{self, Changes};
use crate::domain::unique::State;
use crate::error::{Error, Result};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{self, Datum, Element, Json, Timestamp, ToDatum};
use crate::pg::snapshot::Snapshot;
use crate::pg::{catalog, xact};
use crate::store::acl::Profile;
use crate::store::done::Done;
use crate::store::{dlq, history};

sql_function!(awa_dlq_rows, rows);
sql_function!(awa_dlq_retry, retry);
sql_function!(awa_dlq_retry_many, retry_many);
sql_function!(awa_dlq_purge, purge);
sql_function!(awa_dlq_move, bury);

fn may_operate(queue: &str) -> Result<()> {
    access::check(queue, Profile::Operator)
}

fn rows(call: &mut Call) -> Result<Returned> {
    let mut rows = call.rows()?;
    let mut gate = Gate::new()?;
    dlq::read_all(Snapshot::Active, |dead| {
        let job = &dead.done;
        if !gate.admits(&job.queue)? {
            return Ok(true);
        }
        let body = &job.body;
        let entries = history::entries(body.history);
        let last = entries.last().and_then(|e| e.get("error")).and_then(Value::as_str);
        let errors: Vec<Option<Datum>> =
            entries.iter().map(|e| Some(Json(&e.to_string()).to_datum())).collect();
        rows.push(&[
            Some(job.job_id.to_datum()),
            Some(job.queue.as_str().to_datum()),
            Some(body.kind),
            Some(body.args),
            Some(body.attempts.to_datum()),
            Some(dead.reason.as_str().to_datum()),
            Some(Timestamp(job.finalized_at).to_datum()),
            last.map(|error| error.to_datum()),
            Some(i16::from(job.priority).to_datum()),
            Some(body.max_attempts.to_datum()),
            Some(Timestamp(job.run_at).to_datum()),
            Some(Timestamp(body.created_at).to_datum()),
            Some(datum::array(Element::JSONB, &errors)),
            Some(body.metadata.unwrap_or_else(|| Json("{}").to_datum())),
            Some(body.tags.unwrap_or_else(|| datum::text_array::<&str>(&[]))),
            body.unique_key,
            history::progress(body.history).map(|progress| progress.to_datum()),
            job.last_receipt.map(|receipt| receipt.to_datum()),
        ])?;
        Ok(true)
    })?;
    Ok(Returned::Void)
}

fn retry(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.dlq_retry()")?;
    let job_id = required(call.i64(0), "job_id")?;
    let given = call.jsonb_value(1).unwrap_or(Value::Null);
    let changes = read_changes(given)?;
    let state = revive::retry_dead(job_id, &changes, may_operate)?;
    Ok(Returned::Value(catalog::job_state(state)?))
}

fn read_changes(given: Value) -> Result<Changes> {
    let given = options(given, "opts", &["priority", "queue", "run_at"])?;
    let get = |key: &str| given.get(key).filter(|value| !value.is_null());
    let text = |key: &str| match get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(Error::invalid(format!("{key} must be a text"))),
    };
    let priority = get("priority")
        .map(|value| {
            let wrong = || Error::invalid("priority must be an integer");
            let given = value.as_i64().and_then(|p| i32::try_from(p).ok());
            check_priority(given.ok_or_else(wrong)?)
        })
        .transpose()?;
    let queue = text("queue")?;
    if let Some(queue) = &queue {
        check_name(queue, "queue name")?;
    }
    let run_at = text("run_at")?.map(|text| datum::parse_timestamp(&text)).transpose()?;
    Ok(Changes { priority, queue, run_at: run_at.map(|at| at.0) })
}

/// Which dead letters argument 0 names. A queue that is named must be the caller's; of all
/// queues only the caller's are meant.
fn named(call: &Call) -> Result<impl Fn(&Done) -> Result<bool>> {
    let filter = Filter::parse(required(call.jsonb_value(0), "filter")?)?;
    if let Some(queue) = &filter.queue {
        may_operate(queue)?;
    }
    Ok(move |row: &Done| {
        Ok(filter.admits(row.job_id, &row.queue, &row.body, State::Failed)
            && access::may(&row.queue, Profile::Operator)?)
    })
}

fn retry_many(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.dlq_retry_many()")?;
    let named = named(call)?;
    Ok(Returned::value(revive::retry_all_dead(named)? as i64))
}

fn purge(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.dlq_purge()")?;
    let named = named(call)?;
    Ok(Returned::value(revive::purge_dead(named)? as i64))
}

fn bury(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.dlq_move()")?;
    let job_id = required(call.i64(0), "job_id")?;
    let reason = history::cut(&required(call.text(1), "reason")?);
    Ok(Returned::value(revive::bury(job_id, &reason, may_operate)?))
}
