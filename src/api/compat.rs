//! insert_jobs_compat_batch: jobs as columns.

use std::collections::HashSet;

use super::access;
use super::compat_job::{Given, Tags};
use super::produce::{MAX_JOBS, report};
use crate::dispatch::batch;
use crate::dispatch::enqueue::NewJob;
use crate::error::{Error, Result};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{self, Datum, Element};
use crate::pg::{catalog, xact};
use crate::store::acl::Profile;

sql_function!(awa_insert_jobs_compat_batch, insert_batch);

/// A column of the batch: one value a job, or none at all.
struct Column<T>(Option<Vec<Option<T>>>);

impl<T: Clone> Column<T> {
    fn check(&self, name: &str, jobs: usize) -> Result<()> {
        match &self.0 {
            Some(values) if values.len() != jobs => Err(Error::invalid(format!(
                "{name} has {} elements, kinds has {jobs}",
                values.len()
            ))
            .hint("Arrays must have one length; a NULL array stands for defaults.")),
            _ => Ok(()),
        }
    }

    fn at(&self, at: usize) -> Option<T> {
        self.0.as_ref().and_then(|values| values.get(at).cloned().flatten())
    }
}

/// Inserts up to 100,000 jobs given as columns, set-based.
///
/// Arguments: kinds, queues, args, states (available, scheduled, retryable), priorities,
/// max_attempts, run_ats, metadata, tags (jsonb arrays of texts), unique_keys, unique_states,
/// ordering_keys: arrays of one length, a NULL array or element stands for the default;
/// skip_unique_conflicts. Result: a row a job in input order, with the id of the job that holds
/// its key where it is a duplicate. Errors: 22023 for arrays that do not fit or a state that a
/// job cannot begin in, 23502 for a NULL kind, 23514 for a value beyond its limits, 23505 for a
/// duplicate unless they are skipped. All or none.
fn insert_batch(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.insert_jobs_compat_batch()")?;
    let kinds = call.text_array(0)?.unwrap_or_default();
    let count = kinds.len();
    if count > MAX_JOBS {
        return Err(Error::invalid(format!("at most {MAX_JOBS} jobs can be inserted at once"))
            .hint("Split the arrays."));
    }
    let batch = Batch::read(call, count)?;
    let mut checked: HashSet<String> = HashSet::new();
    let mut jobs = Vec::with_capacity(count);
    for (at, kind) in kinds.into_iter().enumerate() {
        let job = batch.job(at, kind).map_err(|error| {
            let detail = format!("Job {} of the batch is malformed.", at + 1);
            if error.detail.is_some() { error } else { error.detail(detail) }
        })?;
        if !checked.contains(&job.queue) {
            access::check(&job.queue, Profile::Producer)?;
            checked.insert(job.queue.clone());
        }
        jobs.push(job);
    }
    report(call, &batch::enqueue_courteously(jobs)?)
}

struct Batch {
    queues: Column<String>,
    args: Column<Datum>,
    states: Column<Datum>,
    priorities: Column<i16>,
    max_attempts: Column<i16>,
    run_ats: Column<datum::Timestamp>,
    metadata: Column<Datum>,
    tags: Column<Datum>,
    unique_keys: Column<Vec<u8>>,
    unique_states: Column<datum::Bits8>,
    ordering_keys: Column<Vec<u8>>,
    skips_conflicts: bool,
}

impl Batch {
    fn read(call: &Call, count: usize) -> Result<Self> {
        let batch = Self {
            queues: Column(call.text_array(1)?),
            args: Column(call.datums(2, Element::JSONB)?),
            states: Column(call.datums(3, Element::enumeration(catalog::job_state_type()?))?),
            priorities: Column(call.i16_array(4)?),
            max_attempts: Column(call.i16_array(5)?),
            run_ats: Column(call.timestamp_array(6)?),
            metadata: Column(call.datums(7, Element::JSONB)?),
            tags: Column(call.datums(8, Element::JSONB)?),
            unique_keys: Column(call.bytea_array(9)?),
            unique_states: Column(call.bits8_array(10)?),
            ordering_keys: Column(call.bytea_array(11)?),
            skips_conflicts: call.bool(12).unwrap_or(false),
        };
        batch.queues.check("queues", count)?;
        batch.args.check("args", count)?;
        batch.states.check("states", count)?;
        batch.priorities.check("priorities", count)?;
        batch.max_attempts.check("max_attempts", count)?;
        batch.run_ats.check("run_ats", count)?;
        batch.metadata.check("metadata", count)?;
        batch.tags.check("tags", count)?;
        batch.unique_keys.check("unique_keys", count)?;
        batch.unique_states.check("unique_states", count)?;
        batch.ordering_keys.check("ordering_keys", count)?;
        Ok(batch)
    }

    fn job(&self, at: usize, kind: Option<String>) -> Result<NewJob> {
        let given = Given {
            kind,
            queue: self.queues.at(at),
            args: self.args.at(at),
            state: self.states.at(at),
            priority: self.priorities.at(at),
            max_attempts: self.max_attempts.at(at),
            run_at: self.run_ats.at(at).map(|at| at.0),
            metadata: self.metadata.at(at),
            tags: self.tags.at(at).map(Tags::Json),
            unique_key: self.unique_keys.at(at),
            unique_states: self.unique_states.at(at),
            ordering_key: self.ordering_keys.at(at),
        };
        given.into_job(!self.skips_conflicts)
    }
}
