//! set_progress.

use serde_json::{Map, Value, json};

use super::access;
use super::args::required;
use crate::dispatch::progress;
use crate::error::{Error, Result};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::xact;
use crate::store::acl::Profile;

sql_function!(awa_set_progress, set_progress);

/// What is not given stays as it was.
fn set_progress(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.set_progress()")?;
    let receipt = required(call.i64(0), "receipt")?;
    let percent = call.i32(1).map(|percent| percent.clamp(0, 100));
    let message = call.text(2);
    let metadata = match call.jsonb_value(3) {
        None | Some(Value::Null) => None,
        Some(Value::Object(members)) => Some(members),
        Some(_) => return Err(Error::invalid("metadata must be a JSON object")),
    };
    let may = |queue: &str| access::check(queue, Profile::Worker);
    progress::set(receipt, may, |before| merge(before, percent, message, metadata))?;
    Ok(Returned::Void)
}

/// Members of metadata replace those of the same name, whole.
fn merge(
    before: Option<Value>,
    percent: Option<i32>,
    message: Option<String>,
    metadata: Option<Map<String, Value>>,
) -> Value {
    let mut now = match before {
        Some(before @ Value::Object(_)) => before,
        _ => json!({ "percent": null, "message": null, "metadata": {} }),
    };
    if let Some(percent) = percent {
        now["percent"] = json!(percent);
    }
    if let Some(message) = message {
        now["message"] = json!(message);
    }
    if let Some(metadata) = metadata {
        match now.get_mut("metadata") {
            Some(Value::Object(known)) => known.extend(metadata),
            _ => now["metadata"] = Value::Object(metadata),
        }
    }
    now
}
