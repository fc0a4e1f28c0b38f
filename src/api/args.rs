//! Checks that many functions share.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::domain::name::{self, BadName};
use crate::error::{Error, Result, SqlState};
use crate::pg::call::Call;
use crate::pg::datum::Interval;

/// 22023 for NULL.
pub fn required<T>(value: Option<T>, what: &str) -> Result<T> {
    value.ok_or_else(|| Error::invalid(format!("{what} must not be null")))
}

/// 23514 unless the name is 1 to 200 characters without control characters.
pub fn check_name(name: &str, what: &str) -> Result<()> {
    let violation = |message: String| Err(Error::new(SqlState::CHECK_VIOLATION, message));
    match name::check(name) {
        Ok(()) => Ok(()),
        Err(BadName::Empty) => violation(format!("{what} must not be empty")),
        Err(BadName::TooLong) => {
            violation(format!("{what} must have at most {} characters", name::MAX_CHARS))
        }
        Err(BadName::ControlCharacter) => {
            violation(format!("{what} must not contain control characters"))
        }
    }
}

/// A queue's name from argument `i`.
pub fn queue(call: &Call, i: usize) -> Result<String> {
    let queue = required(call.text(i), "queue")?;
    check_name(&queue, "queue name")?;
    Ok(queue)
}

/// Names of queues from argument `i`: not NULL, without NULLs, each once.
pub fn queues(call: &Call, i: usize) -> Result<Vec<String>> {
    let given = required(call.text_array(i)?, "queues")?;
    let mut seen = HashSet::with_capacity(given.len());
    let mut names = Vec::with_capacity(given.len());
    for name in given {
        let name = required(name, "queue")?;
        check_name(&name, "queue name")?;
        if seen.insert(name.clone()) {
            names.push(name);
        }
    }
    Ok(names)
}

/// A duration in microseconds: 22023 where it is negative.
pub fn duration(value: Option<Interval>, what: &str) -> Result<Option<i64>> {
    let Some(interval) = value else { return Ok(None) };
    let micros = interval.to_micros();
    if micros < 0 {
        return Err(Error::invalid(format!("{what} must not be negative")));
    }
    Ok(Some(micros))
}

/// The members of an options object: 22023 for anything else, or a key that is unknown.
pub fn options(value: Value, what: &str, known: &[&str]) -> Result<Map<String, Value>> {
    let members = match value {
        Value::Object(members) => members,
        Value::Null => Map::new(),
        _ => return Err(Error::invalid(format!("{what} must be a JSON object"))),
    };
    if let Some(key) = members.keys().find(|key| !known.contains(&key.as_str())) {
        return Err(Error::invalid(format!("unknown key \"{key}\" in {what}")).hint(
            if known.is_empty() {
                "No keys are known here.".to_owned()
            } else {
                format!("Known keys are {}.", known.join(", "))
            },
        ));
    }
    Ok(members)
}

/// Receipts from argument `i`: distinct, in input order. NULL elements: 22023.
pub fn receipts(call: &Call, i: usize) -> Result<Vec<i64>> {
    let given = required(call.i64_array(i)?, "receipts")?;
    let mut seen = HashSet::with_capacity(given.len());
    let mut receipts = Vec::with_capacity(given.len());
    for receipt in given {
        let receipt = required(receipt, "receipt")?;
        if seen.insert(receipt) {
            receipts.push(receipt);
        }
    }
    Ok(receipts)
}
