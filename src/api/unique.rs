//! What a producer says about the uniqueness of a job.

use serde_json::{Map, Value};

use super::access;
use crate::dispatch::enqueue::Unique;
use crate::dispatch::replace::Replace;
use crate::domain::unique::{self, Mask, Parts, State};
use crate::error::{Error, Result, SqlState};
use crate::pg::datum::{self, Datum};
use crate::pg::xact;
use crate::store::acl::Profile;

/// What a B-tree of 8 KiB pages can surely hold.
const MAX_KEY: usize = 2000;

/// An option that is there and not null.
fn given<'a>(opts: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    opts.get(name).filter(|value| !value.is_null())
}

/// The key of a job, from `unique_key` or by `unique_by`; None: it has none.
pub fn read(
    kind: &str,
    queue: &str,
    args: Datum,
    key: Option<String>,
    opts: &Map<String, Value>,
) -> Result<Option<Unique>> {
    let mask = given(opts, "unique_states").map_or(Ok(Mask::DEFAULT), states)?;
    let (is_strict, replace) = on_conflict(opts)?;
    let throttle = given(opts, "throttle").map(|value| length("throttle", value)).transpose()?;
    let by = given(opts, "unique_by");
    let period = given(opts, "unique_period");
    let period = period.map(|value| length("unique_period", value)).transpose()?;
    let key = match (key, by) {
        (Some(_), Some(_)) => {
            return Err(Error::invalid("unique_by cannot be used together with unique_key")
                .detail("The key of a job is either given or computed."));
        }
        (None, None) if throttle.is_some() => {
            return Err(Error::invalid("throttle needs unique_key or unique_by"));
        }
        (None, None) if period.is_none() => return Ok(None),
        (_, None) if period.is_some() => {
            return Err(Error::invalid("unique_period needs unique_by"));
        }
        (Some(key), None) => key.into_bytes(),
        (None, by) => compute(kind, queue, args, by, period)?,
    };
    if key.len() > MAX_KEY {
        return Err(Error::new(
            SqlState::CHECK_VIOLATION,
            format!("unique_key must have at most {MAX_KEY} bytes"),
        )
        .detail(format!("The key given has {}.", key.len())));
    }
    Ok(Some(Unique { key, mask, is_strict, replace, throttle }))
}

fn texts<'a>(value: &'a Value, what: &str) -> Result<Vec<&'a str>> {
    let wrong = || Error::invalid(format!("{what} must be an array of texts"));
    let array = value.as_array().ok_or_else(wrong)?;
    array.iter().map(|element| element.as_str().ok_or_else(wrong)).collect()
}

fn states(value: &Value) -> Result<Mask> {
    let states = texts(value, "unique_states")?
        .into_iter()
        .map(|label| {
            State::from_label(label).ok_or_else(|| {
                let known: Vec<&str> = State::ALL.iter().map(|(_, label)| *label).collect();
                Error::invalid(format!("unknown state \"{label}\" in unique_states"))
                    .hint(format!("States are {}.", known.join(", ")))
            })
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(Mask::of(states))
}

/// Whether a duplicate is an error, or what it does to the job that is there.
fn on_conflict(opts: &Map<String, Value>) -> Result<(bool, Option<Replace>)> {
    let may = |queue: &str| access::check(queue, Profile::Producer);
    Ok(match given(opts, "on_conflict").map(|value| value.as_str().unwrap_or("")) {
        None | Some("return") => (false, None),
        Some("error") => (true, None),
        Some("replace") => (false, Some(Replace { moves: false, may })),
        Some("debounce") => (false, Some(Replace { moves: true, may })),
        Some(_) => {
            return Err(Error::invalid(
                "on_conflict must be one of return, error, replace, debounce",
            ));
        }
    })
}

/// Microseconds, more than none.
fn length(name: &str, value: &Value) -> Result<i64> {
    let text =
        value.as_str().ok_or_else(|| Error::invalid(format!("{name} must be interval text")))?;
    let micros = datum::parse_interval(text)?.to_micros();
    if micros <= 0 {
        return Err(Error::invalid(format!("{name} must be longer than nothing")));
    }
    Ok(micros)
}

fn compute(
    kind: &str,
    queue: &str,
    args: Datum,
    by: Option<&Value>,
    period: Option<i64>,
) -> Result<Vec<u8>> {
    let names = by.map_or(Ok(Vec::new()), |by| texts(by, "unique_by"))?;
    if let Some(name) = names.iter().find(|name| !["queue", "args"].contains(name)) {
        return Err(Error::invalid(format!("unknown name \"{name}\" in unique_by"))
            .hint("Known names are queue, args."));
    }
    let canonical = names.contains(&"args").then(|| unique::canonical(&datum::own_json_text(args)));
    let mut parts = Parts {
        queue: names.contains(&"queue").then_some(queue),
        args: canonical.as_deref(),
        period: None,
    };
    parts.period = period.map(|period| unique::period_of(xact::micros(), period));
    Ok(unique::derive(kind, parts).to_vec())
}
