//! insert_job_compat: one job, its state given; and what it shares with the batch.

use serde_json::Value;

use super::args::check_name;
use super::produce::{MAX_TAGS, check_max_attempts};
use super::{access, jobs};
use crate::dispatch::enqueue::{self, NewJob, Unique, check_priority};
use crate::domain::unique::{Mask, State};
use crate::error::{Error, Result, SqlState};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{self, Bits8, Datum, Element, Json, ToDatum};
use crate::pg::{catalog, xact};
use crate::store::acl::Profile;
use crate::store::body::Body;
use crate::store::jobs::{self as stored, Job};

sql_function!(awa_insert_job_compat, insert_job);

const PRIORITY: i16 = 2;
const MAX_ATTEMPTS: i16 = 25;

/// What a producer says of one job; None stands for the default.
#[derive(Default)]
pub(super) struct Given {
    pub kind: Option<String>,
    pub queue: Option<String>,
    pub args: Option<Datum>,
    /// A value of awa.job_state.
    pub state: Option<Datum>,
    pub priority: Option<i16>,
    pub max_attempts: Option<i16>,
    pub run_at: Option<i64>,
    pub metadata: Option<Datum>,
    pub tags: Option<Tags>,
    pub unique_key: Option<Vec<u8>>,
    pub unique_states: Option<Bits8>,
    pub ordering_key: Option<Vec<u8>>,
}

pub(super) enum Tags {
    Texts(Vec<String>),
    /// An array of texts in a jsonb.
    Json(Datum),
}

impl Given {
    /// Checked in the order of the contract.
    ///
    /// * `is_strict` - 23505 for a duplicate
    pub(super) fn into_job(self, is_strict: bool) -> Result<NewJob> {
        if let Some(kind) = &self.kind {
            check_name(kind, "job kind")?;
        }
        let queue = self.queue.unwrap_or_else(|| "default".to_owned());
        check_name(&queue, "queue name")?;
        let priority = self.priority.map(|p| check_priority(p.into())).transpose()?;
        let max_attempts =
            self.max_attempts.map(|max| check_max_attempts(max.into())).transpose()?;
        let tags = self.tags.map(Tags::read).transpose()?;
        let kind = self
            .kind
            .ok_or_else(|| Error::new(SqlState::NOT_NULL_VIOLATION, "kind must not be null"))?;
        let state = self.state.map(read_state).transpose()?;
        let unique = match (self.unique_key, self.unique_states) {
            (Some(key), Some(states)) => {
                Some(Unique { key, mask: Mask(states.0), is_strict, replace: None, throttle: None })
            }
            // A key without states is not unique.
            _ => None,
        };
        Ok(NewJob {
            queue,
            priority,
            max_attempts,
            run_at: self.run_at,
            state: Some(state.unwrap_or(State::Available)),
            unique,
            body: Body {
                created_at: 0,
                run_at: None,
                expires_at: None,
                attempts: 0,
                max_attempts: 0,
                kind: kind.to_datum(),
                args: plain(self.args).unwrap_or_else(|| Json("{}").to_datum()),
                metadata: plain(self.metadata),
                tags: tags.map(|tags| datum::text_array(&tags)),
                unique_key: None,
                unique_states: None,
                ordering_key: self.ordering_key.map(|key| key.as_slice().to_datum()),
                concurrency_key: None,
                attempt_deadline: None,
                history: None,
            },
        })
    }
}

/// Detoasted, since it is written to a table of ours.
fn plain(value: Option<Datum>) -> Option<Datum> {
    value.map(datum::own_plain)
}

/// The states a job may begin in.
pub(super) fn first_state(value: Datum) -> Option<State> {
    match State::from_label(&catalog::enum_label(value)?)? {
        state @ (State::Available | State::Scheduled | State::Retryable) => Some(state),
        _ => None,
    }
}

fn read_state(value: Datum) -> Result<State> {
    first_state(value).ok_or_else(|| {
        let label = catalog::enum_label(value).unwrap_or_default();
        Error::invalid(format!("a job cannot begin in state \"{label}\""))
            .hint("It can be available, scheduled or retryable.")
    })
}

impl Tags {
    fn read(self) -> Result<Vec<String>> {
        let tags = match self {
            Self::Texts(tags) => tags,
            Self::Json(value) => {
                let wrong = || Error::invalid("tags must be arrays of texts");
                let json: Value =
                    serde_json::from_str(&datum::own_json_text(value)).map_err(|_| wrong())?;
                let tags = json.as_array().ok_or_else(wrong)?;
                let text = |tag: &Value| tag.as_str().map(str::to_owned).ok_or_else(wrong);
                tags.iter().map(text).collect::<Result<_>>()?
            }
        };
        if tags.len() > MAX_TAGS {
            return Err(Error::new(
                SqlState::CHECK_VIOLATION,
                format!("a job must have at most {MAX_TAGS} tags"),
            ));
        }
        Ok(tags)
    }
}

/// Enqueues a job and returns its row.
///
/// Arguments: p_kind, p_queue, p_args, p_state (available, scheduled, retryable; it decides,
/// whatever p_run_at says), p_priority, p_max_attempts, p_run_at, p_metadata, p_tags,
/// p_unique_key, p_unique_states (eight bits, state by state; without them the key is not
/// unique), p_ordering_key. NULL stands for the default. Errors: 23514 for a value beyond its
/// limits, 23502 for a NULL kind, 22023 for another state, 23505 for a duplicate.
fn insert_job(call: &mut Call) -> Result<Returned> {
    let given = Given {
        kind: call.text(0),
        queue: call.text(1),
        args: call.raw(2),
        state: call.raw(3),
        priority: call.i16(4),
        max_attempts: call.i16(5),
        run_at: call.timestamp(6).map(|at| at.0),
        metadata: call.raw(7),
        tags: call.text_array(8)?.map(|tags| Tags::Texts(tags.into_iter().flatten().collect())),
        unique_key: call.bytea(9),
        unique_states: call.raw(10).map(eight_bits).transpose()?,
        ordering_key: call.bytea(11),
    };
    let row = insert(given)?;
    Ok(Returned::Value(call.row(&row)?))
}

/// The argument is a `bit` of any length: a function's declaration keeps none.
fn eight_bits(value: Datum) -> Result<Bits8> {
    match datum::own_bit_count(value) {
        8 => Ok(datum::own_bits8(value)),
        count => Err(Error::invalid(format!("unique states must have 8 bits, not {count}"))),
    }
}

/// Enqueues a job; its row as it is then.
pub(super) fn insert(mut given: Given) -> Result<[Option<Datum>; jobs::COLUMNS]> {
    // Not those of the queue: clients count on what the declaration says.
    given.priority = given.priority.or(Some(PRIORITY));
    given.max_attempts = given.max_attempts.or(Some(MAX_ATTEMPTS));
    let job = given.into_job(true)?;
    access::check(&job.queue, Profile::Producer)?;
    let now = xact::micros();
    let enqueued = enqueue::enqueue_at(now, vec![job.clone()])?;
    let id = enqueued.first().ok_or_else(|| Error::internal("no id for a job"))?.id;
    let mut row = jobs::row(&shown(job, id, now), now)?;
    // A job read back has NULL there; a client that decodes this row counts on an array.
    if let Some(errors) = row.get_mut(jobs::ERRORS) {
        *errors = Some(datum::array(Element::JSONB, &[]));
    }
    Ok(row)
}

fn shown(job: NewJob, job_id: i64, now: i64) -> Job {
    let mut body = job.body;
    body.created_at = now;
    body.max_attempts = job.max_attempts.unwrap_or(MAX_ATTEMPTS);
    if let Some(unique) = &job.unique {
        body.unique_key = Some(unique.key.as_slice().to_datum());
        body.unique_states = Some(Bits8(unique.mask.0).to_datum());
    }
    Job {
        job_id,
        queue: job.queue,
        priority: job.priority.unwrap_or(PRIORITY as u8),
        state: match job.state {
            Some(State::Scheduled) => stored::State::Scheduled,
            Some(State::Retryable) => stored::State::Retryable,
            _ => stored::State::Available,
        },
        on_disk: true,
        attempt: 0,
        run_at: job.run_at.filter(|at| *at != i64::MIN).unwrap_or(now),
        receipt: None,
        deadline: None,
        attempted_at: None,
        finalized_at: None,
        errors: Vec::new(),
        note: None,
        progress: None,
        result: None,
        body,
    }
}
