//! Putting jobs into the database.

use std::cell::RefCell;

use super::session::{attach_generation, capacity, confirm, reserve_log, with_log};
use crate::domain::dispatcher::{Grant, Granted};
use crate::domain::entities::{Db, QueueSettings, position};
use crate::domain::undo::Act;
use crate::error::{Error, Result, SqlState};
use crate::pg::xact;
use crate::store::body::{self, Body, Placed};
use crate::store::{chunks, deferred, lanes, queues};

/// A job to be enqueued. None stands for the queue's default.
#[derive(Clone, Debug)]
pub struct NewJob {
    pub queue: String,
    pub priority: Option<u8>,
    pub max_attempts: Option<i16>,
    /// In the future: the job is scheduled.
    pub run_at: Option<i64>,
    /// `created_at`, `run_at` and `max_attempts` are filled in here.
    pub body: Body,
}

/// A ready job that was deferred, on its way into its lane.
pub struct Promoted {
    pub job_id: i64,
    pub priority: u8,
    pub shard: u8,
    pub body: Body,
}

thread_local! {
    /// Lanes whose rows this transaction wrote already. Forgotten with every rollback:
    /// a row too many is harmless.
    static WRITTEN: RefCell<Vec<i64>> = const { RefCell::new(Vec::new()) };
}

/// Lanes written so far are no longer known to be.
pub(super) fn forget_written_lanes() {
    WRITTEN.with_borrow_mut(Vec::clear);
}

/// Enqueues jobs and returns their ids in order. All or none: an error leaves nothing.
pub fn enqueue(jobs: Vec<NewJob>) -> Result<Vec<i64>> {
    xact::ensure_writable("awa.insert_job()")?;
    let (db, generation) = attach_generation()?;
    let now = xact::micros();
    let mut ids = vec![0; jobs.len()];
    let mut ready = Groups::default();
    let mut later = Vec::new();
    for (at, mut job) in jobs.into_iter().enumerate() {
        let settings = ready.settings(&job.queue)?;
        let priority = job.priority.unwrap_or(settings.priority);
        let shard = shard_of(&settings);
        job.body.created_at = now;
        job.body.max_attempts = job.max_attempts.unwrap_or(settings.max_attempts);
        match job.run_at {
            Some(run_at) if run_at > now => later.push((at, run_at, priority, shard, job)),
            Some(run_at) => {
                job.body.run_at = (run_at != now).then_some(run_at);
                ready.add(&job.queue, priority, shard, at, None, job.body);
            }
            None => ready.add(&job.queue, priority, shard, at, None, job.body),
        }
    }
    for group in ready.groups {
        write_group(db, &group, now, &mut ids)?;
    }
    if !later.is_empty() {
        defer(db, later, &mut ids)?;
    }
    confirm(db, generation)?;
    Ok(ids)
}

/// Writes the bodies of promoted jobs of one queue; their rows in `deferred_jobs` are the
/// caller's to delete, in the same transaction.
pub fn promote(queue: &str, jobs: Vec<Promoted>) -> Result<()> {
    let (db, generation) = attach_generation()?;
    let now = xact::micros();
    let mut ids = vec![0; jobs.len()];
    let mut ready = Groups::default();
    for (at, job) in jobs.into_iter().enumerate() {
        ready.add(queue, job.priority, job.shard, at, Some(job.job_id), job.body);
    }
    for group in ready.groups {
        write_group(db, &group, now, &mut ids)?;
    }
    confirm(db, generation)
}

/// Sessions spread over the shards of a queue, each stays on its own.
fn shard_of(settings: &QueueSettings) -> u8 {
    let shards = settings.shards.max(1);
    (crate::pg::latch::my_pid().unsigned_abs() % u32::from(shards)) as u8
}

struct Group {
    queue: String,
    priority: u8,
    shard: u8,
    /// Where each stood in the call, its id if it has one already, and the body.
    jobs: Vec<(usize, Option<i64>, Body)>,
}

#[derive(Default)]
struct Groups {
    groups: Vec<Group>,
    settings: Vec<(String, QueueSettings)>,
}

impl Groups {
    fn settings(&mut self, queue: &str) -> Result<QueueSettings> {
        // Calls name few queues, and the last one most of the time.
        if let Some((_, settings)) = self.settings.iter().rev().find(|(name, _)| name == queue) {
            return Ok(*settings);
        }
        let (_, at) = queues::ensure_loaded(queue)?;
        let settings = super::with(|d| d.queues.get(at).map(|q| q.settings)).unwrap_or_default();
        self.settings.push((queue.to_owned(), settings));
        Ok(settings)
    }

    fn add(
        &mut self,
        queue: &str,
        priority: u8,
        shard: u8,
        at: usize,
        job_id: Option<i64>,
        body: Body,
    ) {
        let same = |g: &&mut Group| g.priority == priority && g.shard == shard && g.queue == queue;
        match self.groups.iter_mut().rev().find(same) {
            Some(group) => group.jobs.push((at, job_id, body)),
            None => self.groups.push(Group {
                queue: queue.to_owned(),
                priority,
                shard,
                jobs: vec![(at, job_id, body)],
            }),
        }
    }
}

fn write_group(db: Db, group: &Group, now: i64, ids: &mut [i64]) -> Result<()> {
    let mut rest = group.jobs.as_slice();
    let mut placed: Vec<Placed> = Vec::with_capacity(rest.len());
    let mut segment = None;
    while !rest.is_empty() {
        let grant = grant(db, group, rest.len(), now)?;
        if grant.write_lane {
            write_lane(db, group, grant.lane_id)?;
        }
        if segment.is_some_and(|s| s != grant.segment) {
            // The ring turned between two grants.
            body::write(segment.unwrap_or(grant.segment), &placed)?;
            placed.clear();
        }
        segment = Some(grant.segment);
        let (now_placed, behind) = rest.split_at(usize::from(grant.count).min(rest.len()));
        for (offset, (at, job_id, body)) in now_placed.iter().enumerate() {
            let position = position(grant.chunk, grant.first + offset as u16);
            if let Some(id) = ids.get_mut(*at) {
                *id = job_id.unwrap_or(position);
            }
            placed.push(Placed { position, lane_id: grant.lane_id, job_id: *job_id, body: *body });
        }
        rest = behind;
    }
    if let Some(segment) = segment {
        body::write(segment, &placed)?;
    }
    Ok(())
}

/// Offsets of one chunk for up to `want` jobs of a lane.
fn grant(db: Db, group: &Group, want: usize, now: i64) -> Result<Grant> {
    let Group { queue, priority, shard, .. } = group;
    reserve_log(1)?;
    let subxact = xact::current_subxact();
    loop {
        let granted = super::with(|d| {
            with_log(|log| d.enqueue(db, queue, (*priority, *shard), want, now, log, subxact))
        });
        match granted.map_err(capacity)? {
            Granted::Some(grant) => return Ok(grant),
            Granted::NeedsBlock => add_block(db)?,
            Granted::NeedsLane => {
                let durable = lanes::find(queue, *priority, *shard)?;
                let added = super::with(|d| {
                    let Some(id) = durable.or_else(|| d.take_number(db)) else {
                        return Ok(false);
                    };
                    let at = d.ensure_queue(db, queue)?;
                    d.add_lane(db, at, *priority, *shard, id, durable.is_some()).map(|_| true)
                });
                if !added.map_err(capacity)? {
                    add_block(db)?;
                }
            }
        }
    }
}

fn add_block(db: Db) -> Result<()> {
    let (first, count) = chunks::next_block()?;
    super::with(|d| d.add_block(db, first, count));
    Ok(())
}

fn write_lane(db: Db, group: &Group, id: i64) -> Result<()> {
    if WRITTEN.with_borrow(|written| written.contains(&id)) {
        return Ok(());
    }
    reserve_log(1)?;
    lanes::write(id, &group.queue, group.priority, group.shard)?;
    WRITTEN.with_borrow_mut(|written| {
        if written.len() >= 64 {
            written.clear();
        }
        written.push(id);
    });
    let subxact = xact::current_subxact();
    super::with(|d| {
        let lane = d.queue(db, &group.queue).and_then(|q| d.lane(q, group.priority, group.shard));
        if let Some(lane) = lane {
            super::log_act(d, db, subxact, Act::Lane { lane, id });
        }
    });
    Ok(())
}

/// A job id that is no position of a ready job.
fn take_id(db: Db) -> Result<i64> {
    loop {
        if let Some(id) = super::with(|d| d.take_id(db)) {
            return Ok(id);
        }
        add_block(db)?;
    }
}

fn defer(db: Db, jobs: Vec<(usize, i64, u8, u8, NewJob)>, ids: &mut [i64]) -> Result<()> {
    let mut rows = Vec::with_capacity(jobs.len());
    for (at, run_at, priority, shard, job) in jobs {
        let job_id = take_id(db)?;
        if let Some(id) = ids.get_mut(at) {
            *id = job_id;
        }
        rows.push(deferred::Deferred {
            job_id,
            kind: deferred::Kind::Scheduled,
            run_at,
            queue: job.queue,
            priority,
            shard,
            body: job.body,
        });
    }
    write_deferred(db, &rows)
}

/// Puts jobs aside, and tells the worker when the transaction commits.
pub fn write_deferred(db: Db, rows: &[deferred::Deferred]) -> Result<()> {
    reserve_log(rows.len())?;
    deferred::write(rows)?;
    let subxact = xact::current_subxact();
    super::with(|d| {
        for row in rows {
            let queue = d.ensure_queue(db, &row.queue)?;
            let retryable = row.kind == deferred::Kind::Retryable;
            let act = Act::Defer { queue, retryable, count: 1, due: row.run_at };
            super::log_act(d, db, subxact, act);
        }
        Ok(())
    })
    .map_err(capacity)
}

/// 23514 unless the priority is one.
pub fn check_priority(priority: i32) -> Result<u8> {
    u8::try_from(priority).ok().filter(|p| (1..=4).contains(p)).ok_or_else(|| {
        Error::new(SqlState::CHECK_VIOLATION, "priority must be between 1 and 4")
            .detail(format!("The priority given is {priority}."))
    })
}
