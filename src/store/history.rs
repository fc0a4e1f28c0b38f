//! What a job's body carries from row to row: the errors of its attempts, and the progress
//! that the last one had made.

use serde_json::{Value, json};

use super::errors::AttemptError;
use crate::domain::clock;
use crate::pg::datum::{self, Datum, ToDatum};

/// An error text is kept up to this many bytes, the note about what is missing included: to
/// cut twice changes nothing.
const MAX_ERROR: usize = 8192;
const NOTE: usize = 64;

/// The history with one more error; as it was where there is none.
///
/// * `at` - microseconds of the Postgres clock
pub fn with_error(
    history: Option<Datum>,
    attempt: i16,
    at: i64,
    error: Option<&str>,
) -> Option<Datum> {
    let Some(error) = error else { return history };
    let mut value = value(history);
    let entry = entry(attempt, at, error);
    match value.get_mut("errors").and_then(Value::as_array_mut) {
        Some(errors) => errors.push(entry),
        None => value["errors"] = json!([entry]),
    }
    Some(value.to_datum())
}

/// The history with the errors of some attempts more.
pub fn with_errors(history: Option<Datum>, errors: &[AttemptError]) -> Option<Datum> {
    errors.iter().fold(history, |history, error| {
        with_error(history, error.attempt, error.closed_at, Some(&error.error))
    })
}

fn value(history: Option<Datum>) -> Value {
    history.map(datum::own_json).filter(Value::is_object).unwrap_or_else(|| json!({}))
}

/// The history with other progress.
pub fn with_progress(history: Option<Datum>, progress: Value) -> Option<Datum> {
    let mut value = value(history);
    value["progress"] = progress;
    Some(value.to_datum())
}

/// The progress in a history.
pub fn progress(history: Option<Datum>) -> Option<Value> {
    let mut value = history.map(datum::own_json)?;
    value.get_mut("progress").map(Value::take).filter(|progress| !progress.is_null())
}

/// An error as it is kept and shown.
pub fn entry(attempt: i16, at: i64, error: &str) -> Value {
    json!({ "attempt": attempt, "at": clock::iso(at), "error": cut(error) })
}

/// The errors in a history.
pub fn entries(history: Option<Datum>) -> Vec<Value> {
    match history.map(datum::own_json).as_mut().and_then(|value| value.get_mut("errors")) {
        Some(Value::Array(errors)) => core::mem::take(errors),
        _ => Vec::new(),
    }
}

/// The errors in a history, as JSON texts.
pub fn errors(history: Option<Datum>) -> Vec<String> {
    entries(history).iter().map(Value::to_string).collect()
}

/// A text that `text` columns and JSON can hold, of bounded length.
pub fn cut(error: &str) -> String {
    let clean = error.replace('\0', "");
    if clean.len() <= MAX_ERROR {
        return clean;
    }
    let mut end = MAX_ERROR - NOTE;
    while !clean.is_char_boundary(end) {
        end -= 1;
    }
    format!("{} ... (cut, {} bytes in all)", &clean[..end], clean.len())
}
