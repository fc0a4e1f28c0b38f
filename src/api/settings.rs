//! configure_queue: a queue's settings as users write them.

use serde_json::{Map, Value, json};

use super::access;
use super::args::{self, required};
use crate::domain::backoff::Backoff;
use crate::domain::entities::{Ordering, QueueSettings};
use crate::error::{Error, Result, SqlState};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum;
use crate::pg::{guc, xact};
use crate::store::acl::Profile;
use crate::store::{queues, settings};

sql_function!(awa_configure_queue, configure);

/// Settings of the contract that this version has no use for yet.
const LATER: &[&str] = &["rate_limit", "max_running", "max_running_per_key", "max_depth", "notify"];
const KNOWN: &str = "priority, max_attempts, attempt_deadline, priority_aging, backoff, \
                     enqueue_shards, ordering, dlq_enabled, completed_retention, failed_retention";
const BACKOFF: &[&str] = &["base", "factor", "jitter", "max"];

/// What is not named stays; null restores the default.
fn configure(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.configure_queue()")?;
    let queue = args::queue(call, 0)?;
    let given = match required(call.jsonb_value(1), "settings")? {
        Value::Object(given) => given,
        _ => return Err(Error::invalid("settings must be a JSON object")),
    };
    access::check(&queue, Profile::Operator)?;
    let mut changes = Map::new();
    for (name, value) in &given {
        change(name, value, &mut changes)?;
    }
    let stored = queues::configure(&queue, &Value::Object(changes))?;
    Ok(Returned::value(in_force(&stored)))
}

/// Adds what the row of the queue shall say; null: nothing any more.
fn change(name: &str, value: &Value, changes: &mut Map<String, Value>) -> Result<()> {
    if LATER.contains(&name) {
        return Err(Error::new(
            SqlState::FEATURE_NOT_SUPPORTED,
            format!("queue setting \"{name}\" is not supported by this version"),
        ));
    }
    let (stored, read): (&str, fn(&str, &Value) -> Result<Value>) = match name {
        "priority" => ("priority", |name, value| integer(name, value, 1, 4)),
        "max_attempts" => ("max_attempts", |name, value| integer(name, value, 1, 1000)),
        "enqueue_shards" => ("enqueue_shards", |name, value| integer(name, value, 1, 64)),
        "attempt_deadline" => {
            ("attempt_deadline_us", |name, value| Ok(json!(micros(name, value)?)))
        }
        "priority_aging" => ("priority_aging_us", |name, value| Ok(json!(micros(name, value)?))),
        "completed_retention" => ("completed_retention_us", retention),
        "failed_retention" => ("failed_retention_us", retention),
        "backoff" => ("backoff", backoff),
        "ordering" => ("ordering", ordering),
        "dlq_enabled" => ("dlq_enabled", boolean),
        _ => {
            return Err(Error::invalid(format!("unknown queue setting \"{name}\""))
                .hint(format!("Settings are {KNOWN}.")));
        }
    };
    let value = if value.is_null() { Value::Null } else { read(name, value)? };
    changes.insert(stored.to_owned(), value);
    Ok(())
}

fn integer(name: &str, value: &Value, least: i64, most: i64) -> Result<Value> {
    match value.as_i64() {
        Some(number) if (least..=most).contains(&number) => Ok(json!(number)),
        _ => Err(Error::invalid(format!("{name} must be an integer from {least} to {most}"))),
    }
}

fn number(name: &str, value: &Value, least: f64, most: f64) -> Result<f64> {
    match value.as_f64() {
        Some(number) if (least..=most).contains(&number) => Ok(number),
        _ => Err(Error::invalid(format!("{name} must be a number from {least} to {most}"))),
    }
}

fn micros(name: &str, value: &Value) -> Result<i64> {
    let text =
        value.as_str().ok_or_else(|| Error::invalid(format!("{name} must be interval text")))?;
    let parsed = datum::parse_interval(text)
        .map_err(|_| Error::invalid(format!("{name} is no interval: \"{text}\"")))?;
    args::duration(Some(parsed), name).map(Option::unwrap_or_default)
}

fn boolean(name: &str, value: &Value) -> Result<Value> {
    match value {
        Value::Bool(_) => Ok(value.clone()),
        _ => Err(Error::invalid(format!("{name} must be true or false"))),
    }
}

fn ordering(name: &str, value: &Value) -> Result<Value> {
    match value.as_str() {
        Some(settings::LANE | settings::SERIAL) => Ok(value.clone()),
        Some("strict") => Err(Error::new(
            SqlState::FEATURE_NOT_SUPPORTED,
            format!("{name} \"strict\" is not supported by this version"),
        )
        .hint("With \"serial\", a job in backoff does not block later jobs of its key.")),
        _ => Err(Error::invalid(format!("{name} must be \"lane\" or \"serial\""))),
    }
}

/// -1: for ever.
fn retention(name: &str, value: &Value) -> Result<Value> {
    if value.as_str().is_some_and(|text| text.trim() == "-1") || value.as_i64() == Some(-1) {
        return Ok(json!(-1));
    }
    Ok(json!(micros(name, value)?))
}

fn backoff(_name: &str, value: &Value) -> Result<Value> {
    if !value.is_object() {
        return Err(Error::invalid("backoff must be a JSON object"));
    }
    let given = args::options(value.clone(), "backoff", BACKOFF)?;
    let default = Backoff::default();
    let member = |name: &str| given.get(name).filter(|value| !value.is_null());
    let base = member("base").map_or(Ok(default.base), |value| micros("backoff.base", value))?;
    let max = member("max").map_or(Ok(default.max), |value| micros("backoff.max", value))?;
    let factor = member("factor")
        .map_or(Ok(default.factor), |value| number("backoff.factor", value, 1.0, 1000.0))?;
    let jitter = member("jitter")
        .map_or(Ok(default.jitter), |value| number("backoff.jitter", value, 0.0, 1.0))?;
    Ok(json!({ "base_us": base, "factor": factor, "jitter": jitter, "max_us": max }))
}

/// Every setting as it is now, in the form in which it can be given.
fn in_force(stored: &Value) -> Value {
    let QueueSettings {
        priority,
        shards,
        max_attempts,
        attempt_deadline,
        ageing,
        backoff,
        dlq,
        ordering,
    } = settings::from_json(stored);
    let ordering = match ordering {
        Ordering::Lane => settings::LANE,
        Ordering::Serial => settings::SERIAL,
    };
    let failed = settings::failed_retention(stored)
        .unwrap_or_else(|| guc::failed_retention().as_micros() as i64);
    let completed = settings::completed_retention(stored)
        .unwrap_or_else(|| guc::completed_retention().map_or(-1, |kept| kept.as_micros() as i64));
    let kept = |micros| if micros < 0 { "-1".to_owned() } else { interval(micros) };
    json!({
        "priority": priority,
        "max_attempts": max_attempts,
        "attempt_deadline": interval(attempt_deadline),
        "priority_aging": interval(ageing),
        "backoff": {
            "base": interval(backoff.base),
            "factor": backoff.factor,
            "jitter": backoff.jitter,
            "max": interval(backoff.max),
        },
        "enqueue_shards": shards,
        "ordering": ordering,
        "dlq_enabled": dlq,
        "completed_retention": kept(completed),
        "failed_retention": kept(failed),
    })
}

/// Interval text in the largest unit that says it whole.
fn interval(micros: i64) -> String {
    const UNITS: [(i64, &str); 5] =
        [(3_600_000_000, "h"), (60_000_000, "min"), (1_000_000, "s"), (1_000, "ms"), (1, "us")];
    let whole = |(unit, _): &&(i64, &str)| micros % unit == 0 && micros != 0;
    let (unit, name) = UNITS.iter().find(whole).copied().unwrap_or((1_000_000, "s"));
    format!("{} {name}", micros / unit)
}
