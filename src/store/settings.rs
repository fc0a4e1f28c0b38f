//! A queue's settings, from the JSON of its row. Validated when they were written, so an
//! unreadable value is its default.

use serde_json::Value;

use crate::domain::backoff::Backoff;
use crate::domain::entities::{Ordering, QueueSettings};

pub const LANE: &str = "lane";
pub const SERIAL: &str = "serial";

/// Durations are kept in microseconds.
pub fn from_json(value: &Value) -> QueueSettings {
    let default = QueueSettings::default();
    let int = |key: &str| value.get(key).and_then(Value::as_i64);
    QueueSettings {
        priority: int("priority").and_then(|p| u8::try_from(p).ok()).unwrap_or(default.priority),
        shards: int("enqueue_shards").and_then(|s| u8::try_from(s).ok()).unwrap_or(default.shards),
        max_attempts: int("max_attempts")
            .and_then(|m| i16::try_from(m).ok())
            .unwrap_or(default.max_attempts),
        attempt_deadline: int("attempt_deadline_us").unwrap_or(default.attempt_deadline),
        ageing: int("priority_aging_us").unwrap_or(default.ageing),
        backoff: value.get("backoff").map_or(default.backoff, backoff),
        ordering: match value.get("ordering").and_then(Value::as_str) {
            Some(SERIAL) => Ordering::Serial,
            _ => Ordering::Lane,
        },
        dlq: value.get("dlq_enabled").and_then(Value::as_bool).unwrap_or(default.dlq),
    }
}

/// How long the queue keeps failed and cancelled jobs, microseconds; negative: for ever;
/// None: as the server's setting says.
pub fn failed_retention(value: &Value) -> Option<i64> {
    value.get("failed_retention_us").and_then(Value::as_i64)
}

/// The same of completed ones.
pub fn completed_retention(value: &Value) -> Option<i64> {
    value.get("completed_retention_us").and_then(Value::as_i64)
}

fn backoff(value: &Value) -> Backoff {
    let default = Backoff::default();
    let float = |key: &str| value.get(key).and_then(Value::as_f64);
    let int = |key: &str| value.get(key).and_then(Value::as_i64);
    Backoff {
        base: int("base_us").unwrap_or(default.base),
        factor: float("factor").unwrap_or(default.factor),
        jitter: float("jitter").unwrap_or(default.jitter),
        max: int("max_us").unwrap_or(default.max),
    }
}
