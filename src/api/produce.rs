//! insert_job, insert_jobs.

use core::iter;
use std::collections::HashSet;

use serde_json::{Map, Value};

use super::access;
use super::args::{check_name, options, required};
use super::unique;
use crate::dispatch::batch;
use crate::dispatch::enqueue::{self, Enqueued, NewJob, check_priority};
use crate::error::{Error, Result, SqlState};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{self, Datum, Json, ToDatum};
use crate::pg::json;
use crate::store::acl::Profile;
use crate::store::body::Body;

sql_function!(awa_insert_job, insert_job);
sql_function!(awa_insert_jobs, insert_jobs);

pub(super) const MAX_TAGS: usize = 20;
const MAX_KEY: usize = 255;
pub(super) const MAX_JOBS: usize = 100_000;
const OPTIONS: &[&str] = &[
    "unique_states",
    "unique_by",
    "unique_period",
    "on_conflict",
    "throttle",
    "ordering_key",
    "concurrency_key",
    "deadline",
    "expires_at",
];
const FIELDS: &[&str] = &[
    "kind",
    "args",
    "queue",
    "priority",
    "run_at",
    "max_attempts",
    "tags",
    "metadata",
    "unique_key",
    "opts",
];

/// One job's arguments, checked in the order of the contract.
struct Given {
    kind: String,
    args: Datum,
    queue: String,
    priority: Option<i32>,
    run_at: Option<i64>,
    max_attempts: Option<i32>,
    tags: Option<Vec<String>>,
    metadata: Option<Datum>,
    unique_key: Option<String>,
}

impl Given {
    fn into_job(self, opts: &Map<String, Value>) -> Result<NewJob> {
        check_name(&self.kind, "job kind")?;
        check_name(&self.queue, "queue name")?;
        let priority = self.priority.map(check_priority).transpose()?;
        let max_attempts = self.max_attempts.map(check_max_attempts).transpose()?;
        if self.tags.as_ref().is_some_and(|tags| tags.len() > MAX_TAGS) {
            return Err(Error::new(
                SqlState::CHECK_VIOLATION,
                format!("a job must have at most {MAX_TAGS} tags"),
            ));
        }
        let deadline = opts.get("deadline").filter(|v| !v.is_null()).map(interval).transpose()?;
        let unique = unique::read(&self.kind, &self.queue, self.args, self.unique_key, opts)?;
        let expires = opts.get("expires_at").filter(|v| !v.is_null()).map(time).transpose()?;
        Ok(NewJob {
            queue: self.queue,
            priority,
            max_attempts,
            run_at: self.run_at,
            state: None,
            unique,
            body: Body {
                created_at: 0,
                run_at: None,
                expires_at: expires,
                attempts: 0,
                max_attempts: 0,
                kind: self.kind.to_datum(),
                args: self.args,
                metadata: self.metadata,
                tags: self.tags.map(|tags| datum::text_array(&tags)),
                unique_key: None,
                unique_states: None,
                ordering_key: key(opts, "ordering_key")?,
                concurrency_key: key(opts, "concurrency_key")?,
                attempt_deadline: deadline.map(|d| d.to_datum()),
                history: None,
            },
        })
    }
}

pub(super) fn check_max_attempts(given: i32) -> Result<i16> {
    i16::try_from(given).ok().filter(|max| (1..=1000).contains(max)).ok_or_else(|| {
        Error::new(SqlState::CHECK_VIOLATION, "max_attempts must be between 1 and 1000")
            .detail(format!("The value given is {given}."))
    })
}

fn key(opts: &Map<String, Value>, name: &str) -> Result<Option<Datum>> {
    match opts.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) if text.len() <= MAX_KEY => Ok(Some(text.as_bytes().to_datum())),
        Some(Value::String(_)) => Err(Error::new(
            SqlState::CHECK_VIOLATION,
            format!("{name} must have at most {MAX_KEY} bytes"),
        )),
        Some(_) => Err(Error::invalid(format!("{name} must be a text"))),
    }
}

fn interval(value: &Value) -> Result<datum::Interval> {
    let text = value.as_str().ok_or_else(|| Error::invalid("deadline must be interval text"))?;
    let interval = datum::parse_interval(text)?;
    if interval.to_micros() < 0 {
        return Err(Error::invalid("deadline must not be negative"));
    }
    Ok(interval)
}

fn time(value: &Value) -> Result<i64> {
    let text = value.as_str().ok_or_else(|| Error::invalid("a time must be timestamp text"))?;
    datum::parse_timestamp(text).map(|at| at.0)
}

fn options_of(value: Value) -> Result<Map<String, Value>> {
    options(value, "opts", OPTIONS)
}

fn insert_job(call: &mut Call) -> Result<Returned> {
    let given = Given {
        kind: required(call.text(0), "kind")?,
        args: call.jsonb(1).unwrap_or_else(|| Json("{}").to_datum()),
        queue: call.text(2).unwrap_or_else(|| "default".to_owned()),
        priority: call.i32(3),
        run_at: call.timestamp(4).map(|at| at.0),
        max_attempts: call.i32(5),
        tags: call.text_array(6)?.map(|tags| tags.into_iter().flatten().collect()),
        metadata: call.jsonb(7),
        unique_key: call.text(8),
    };
    let opts = options_of(call.jsonb_value(9).unwrap_or(Value::Null))?;
    let job = given.into_job(&opts)?;
    access::check(&job.queue, Profile::Producer)?;
    let enqueued = enqueue::enqueue(vec![job])?;
    let job = enqueued.first().ok_or_else(|| Error::internal("no id for a job"))?;
    Ok(Returned::value(job.id))
}

fn insert_jobs(call: &mut Call) -> Result<Returned> {
    let array = required(call.raw(0), "jobs")?;
    let defaults = options_of(call.jsonb_value(1).unwrap_or(Value::Null))?;
    let elements = json::objects(array)
        .ok_or_else(|| Error::invalid("jobs must be a JSON array of objects"))?;
    if elements.len() > MAX_JOBS {
        return Err(Error::invalid(format!("at most {MAX_JOBS} jobs can be inserted at once"))
            .hint("Split the array."));
    }
    let mut jobs = Vec::with_capacity(elements.len());
    let mut checked = HashSet::new();
    for (at, element) in elements.into_iter().enumerate() {
        let job = element_to_job(element, &defaults).map_err(|error| {
            let detail = format!("Job {} of the array is malformed.", at + 1);
            if error.detail.is_some() { error } else { error.detail(detail) }
        })?;
        let is_as_before = jobs.last().is_some_and(|before: &NewJob| before.queue == job.queue);
        if !is_as_before && checked.insert(job.queue.clone()) {
            access::check(&job.queue, Profile::Producer)?;
        }
        jobs.push(job);
    }
    report(call, &batch::enqueue_courteously(jobs)?)
}

/// What became of each job, in input order.
pub(super) fn report(call: &mut Call, enqueued: &[Enqueued]) -> Result<Returned> {
    let mut rows = call.rows()?;
    for (ord, job) in iter::zip(1_i64.., enqueued) {
        rows.push(&[
            Some(ord.to_datum()),
            Some(job.id.to_datum()),
            Some(job.is_duplicate.to_datum()),
        ])?;
    }
    Ok(Returned::Void)
}

/// An element of the array. `args` and `metadata` are taken as they are, digit for digit;
/// the rest is read as JSON.
fn element_to_job(element: json::Object, defaults: &Map<String, Value>) -> Result<NewJob> {
    for key in element.keys() {
        if !FIELDS.contains(&key.as_str()) {
            return Err(Error::invalid(format!("unknown key \"{key}\" in a job"))
                .hint(format!("Known keys are {}.", FIELDS.join(", "))));
        }
    }
    let text = |key: &str| match element.value(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::invalid(format!("{key} must be a text"))),
    };
    let int = |key: &str| match element.value(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => value
            .as_i64()
            .and_then(|v| i32::try_from(v).ok())
            .map(Some)
            .ok_or_else(|| Error::invalid(format!("{key} must be an integer"))),
    };
    let tags = match element.value("tags") {
        None | Some(Value::Null) => None,
        Some(Value::Array(tags)) => Some(
            tags.into_iter()
                .map(|tag| match tag {
                    Value::String(tag) => Ok(tag),
                    _ => Err(Error::invalid("tags must be an array of texts")),
                })
                .collect::<Result<Vec<_>>>()?,
        ),
        Some(_) => return Err(Error::invalid("tags must be an array of texts")),
    };
    let mut opts = defaults.clone();
    opts.extend(options_of(element.value("opts").unwrap_or(Value::Null))?);
    let run_at = match element.value("run_at") {
        None | Some(Value::Null) => None,
        Some(value) => Some(time(&value)?),
    };
    let given = Given {
        kind: required(text("kind")?, "kind")?,
        args: element.datum("args").unwrap_or_else(|| Json("{}").to_datum()),
        queue: text("queue")?.unwrap_or_else(|| "default".to_owned()),
        priority: int("priority")?,
        run_at,
        max_attempts: int("max_attempts")?,
        tags,
        metadata: element
            .datum("metadata")
            .filter(|_| element.value("metadata").is_some_and(|value| !value.is_null())),
        unique_key: text("unique_key")?,
    };
    given.into_job(&opts)
}
