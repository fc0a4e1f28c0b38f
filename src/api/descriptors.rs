//! upsert_queue_descriptor, upsert_job_kind_descriptor, and the views over what they wrote.

use serde_json::{Map, Value};

use super::access;
use super::args::{check_name, options, required};
use super::jobs::Gate;
use crate::dispatch;
use crate::error::{Error, Result};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::ToDatum;
use crate::pg::xact;
use crate::store::acl::Profile;
use crate::store::descriptors::{self, New, Subject};

sql_function!(awa_upsert_queue_descriptor, upsert_queue);
sql_function!(awa_upsert_job_kind_descriptor, upsert_kind);
sql_function!(awa_descriptor_rows, rows);

const KEYS: &[&str] = &[
    "display_name",
    "description",
    "owner",
    "docs_url",
    "tags",
    "extra",
    "descriptor_hash",
    "sync_interval_ms",
];
/// Milliseconds.
const SYNC_INTERVAL: i64 = 10_000;
/// A descriptor that was not declared for so many of its intervals is stale.
const MISSED: i64 = 3;

/// Declares what a queue is for.
///
/// Arguments: queue, descriptor (an object; see `KEYS`), runtime (who declares it, for telling
/// whether live ones agree). Result: whether it is another one than before. Errors: 22023 for an
/// unknown key or a wrong type, 23514 for a limit, AW002 for a runtime that is not alive.
fn upsert_queue(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.upsert_queue_descriptor()")?;
    let name = required(call.text(0), "queue")?;
    check_name(&name, "queue name")?;
    if !access::may(&name, Profile::Worker)? {
        access::check(&name, Profile::Operator)?;
    }
    upsert(call, Subject::Queue, &name)
}

/// The same of a kind of jobs, by anybody who works or operates.
fn upsert_kind(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.upsert_job_kind_descriptor()")?;
    access::check_any(&[Profile::Worker, Profile::Operator])?;
    let name = required(call.text(0), "kind")?;
    check_name(&name, "kind")?;
    upsert(call, Subject::Kind, &name)
}

fn upsert(call: &Call, subject: Subject, name: &str) -> Result<Returned> {
    let given = required(call.jsonb_value(1), "descriptor")?;
    let given = options(given, "descriptor", KEYS)?;
    let runtime = call.uuid(2);
    if let Some(id) = &runtime
        && !lives(id)?
    {
        return Err(dispatch::runtime_gone());
    }
    let extra = match given.get("extra") {
        None | Some(Value::Null) => "{}".to_owned(),
        Some(extra @ Value::Object(_)) => extra.to_string(),
        Some(_) => return Err(Error::invalid("extra must be a JSON object")),
    };
    let sync_interval = match given.get("sync_interval_ms") {
        None | Some(Value::Null) => SYNC_INTERVAL,
        Some(value) => {
            value.as_i64().ok_or_else(|| Error::invalid("sync_interval_ms must be an integer"))?
        }
    };
    let mut said = given.clone();
    said.retain(|key, _| !matches!(key.as_str(), "descriptor_hash" | "sync_interval_ms"));
    let own_hash = blake3::hash(Value::Object(said).to_string().as_bytes()).to_hex().to_string();
    let new = New {
        name,
        display_name: text(&given, "display_name")?,
        description: text(&given, "description")?,
        owner: text(&given, "owner")?,
        docs_url: text(&given, "docs_url")?,
        tags: tags(&given)?,
        extra,
        hash: text(&given, "descriptor_hash")?.unwrap_or(&own_hash),
        sync_interval,
    };
    descriptors::upsert(subject, &new, runtime).map(Returned::value)
}

fn text<'a>(given: &'a Map<String, Value>, key: &str) -> Result<Option<&'a str>> {
    match given.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::invalid(format!("{key} must be a string"))),
    }
}

fn tags(given: &Map<String, Value>) -> Result<Vec<String>> {
    let wrong = || Error::invalid("tags must be an array of strings");
    match given.get("tags") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(tags)) => {
            tags.iter().map(|tag| tag.as_str().map(str::to_owned).ok_or_else(wrong)).collect()
        }
        Some(_) => Err(wrong()),
    }
}

fn lives(id: &[u8; 16]) -> Result<bool> {
    dispatch::with_open(|d, db| d.runtime(db, id).is_some_and(|at| !d.runtimes[at].dead))
}

/// Descriptors of queues that the caller may read, or of all kinds, with whether they are stale,
/// and whether live runtimes declare different ones.
fn rows(call: &mut Call) -> Result<Returned> {
    let subject = required(call.text(0), "subject")?;
    let subject = Subject::parse(&subject)
        .ok_or_else(|| Error::invalid(format!("unknown subject \"{subject}\"")))?;
    access::check_any(&[Profile::Reader, Profile::Operator])?;
    let mut rows = call.rows()?;
    let mut gate = Gate::new()?;
    // A standby has no memory of who lives: those who were not seen to leave do.
    let is_standby = xact::is_in_recovery();
    let declared = descriptors::declared(subject, |id| Ok(is_standby || lives(id)?))?;
    let now = xact::micros();
    for found in descriptors::read_all(subject)? {
        if subject == Subject::Queue && !gate.admits(&found.name)? {
            continue;
        }
        let patience = found.sync_interval.saturating_mul(MISSED * 1000);
        let is_stale = now.saturating_sub(found.last_seen_at.0) > patience;
        let has_drifted = declared.get(&found.name).is_some_and(|hashes| hashes.len() > 1);
        let [display_name, description, owner, docs_url, tags, extra] = found.texts;
        rows.push(&[
            Some(found.name.as_str().to_datum()),
            display_name,
            description,
            owner,
            docs_url,
            tags,
            extra,
            Some(found.hash.as_str().to_datum()),
            Some(found.sync_interval.to_datum()),
            Some(found.created_at.to_datum()),
            Some(found.updated_at.to_datum()),
            Some(found.last_seen_at.to_datum()),
            Some(is_stale.to_datum()),
            Some(has_drifted.to_datum()),
        ])?;
    }
    Ok(Returned::Void)
}
