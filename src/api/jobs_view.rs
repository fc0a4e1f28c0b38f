//! Writing to the view `awa.jobs`.

use super::access;
use super::compat_job::{self, Given, Tags};
use crate::dispatch::revive;
use crate::error::{Error, Result, SqlState};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::trigger::{self, Event, Tuple};
use crate::pg::{datum, xact};
use crate::store::acl::Profile;

sql_function!(awa_write_jobs_view, write);

// Numbers of columns.
const ID: i16 = 1;
const KIND: i16 = 2;
const QUEUE: i16 = 3;
const ARGS: i16 = 4;
const STATE: i16 = 5;
const PRIORITY: i16 = 6;
const ATTEMPT: i16 = 7;
const MAX_ATTEMPTS: i16 = 8;
const RUN_AT: i16 = 9;
const METADATA: i16 = 16;
const TAGS: i16 = 17;
const UNIQUE_KEY: i16 = 18;
const UNIQUE_STATES: i16 = 19;
const RUN_LEASE: i16 = 26;

/// Those that a job gets by itself: heartbeat_at to errors, what callbacks have, progress.
const NOT_GIVEN: [i16; 14] = [ID, 10, 11, 12, 13, 14, 15, 20, 21, 22, 23, 24, 25, 27];

/// INSERT is insert_job_compat, DELETE is delete_job, UPDATE is 0A000.
fn write(call: &mut Call) -> Result<Returned> {
    match trigger::event(call)? {
        Event::Insert => insert(&trigger::row(call)?),
        Event::Delete => delete(&trigger::row(call)?),
        _ => Err(Error::new(SqlState::FEATURE_NOT_SUPPORTED, "cannot update jobs")
            .hint("Call the functions of the schema awa, for example awa.cancel_job().")),
    }
}

fn insert(new: &Tuple) -> Result<Returned> {
    xact::ensure_writable("INSERT")?;
    let refused = |what: String| Err(Error::new(SqlState::FEATURE_NOT_SUPPORTED, what));
    let is_zero = |column| new.i16(column).is_none_or(|value| value == 0);
    let is_first = is_zero(ATTEMPT) && new.i64(RUN_LEASE).is_none_or(|receipt| receipt == 0);
    if !is_first || NOT_GIVEN.iter().any(|column| new.raw(*column).is_some()) {
        return refused("a new job cannot be given what its life brings".to_owned());
    }
    let state = new.raw(STATE);
    if state.is_some_and(|state| compat_job::first_state(state).is_none()) {
        return refused("a job can only begin available, scheduled or retryable".to_owned());
    }
    let row = compat_job::insert(Given {
        kind: new.raw(KIND).map(datum::own_text),
        queue: new.raw(QUEUE).map(datum::own_text),
        args: new.raw(ARGS),
        state,
        priority: new.i16(PRIORITY),
        max_attempts: new.i16(MAX_ATTEMPTS),
        run_at: new.i64(RUN_AT),
        metadata: new.raw(METADATA),
        tags: new.raw(TAGS).map(|tags| Tags::Texts(datum::own_texts(tags))),
        unique_key: new.raw(UNIQUE_KEY).map(datum::own_bytes),
        unique_states: new.raw(UNIQUE_STATES).map(datum::own_bits8),
        ordering_key: None,
    })?;
    // What RETURNING shows.
    Ok(Returned::Value(new.like(&row)?))
}

fn delete(old: &Tuple) -> Result<Returned> {
    xact::ensure_writable("DELETE")?;
    let Some(id) = old.i64(ID) else { return Ok(Returned::Void) };
    match revive::delete(id, |queue| access::check(queue, Profile::Operator)) {
        Ok(()) => Ok(Returned::Value(old.datum())),
        // Somebody else was quicker: no row was deleted.
        Err(error) if error.code == SqlState::NOT_FOUND => Ok(Returned::Void),
        Err(error) => Err(error),
    }
}
