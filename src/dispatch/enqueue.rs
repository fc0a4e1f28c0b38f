//! Putting jobs into the database.

use std::cell::RefCell;
use std::collections::HashMap;

use super::keys::{self, Patience, Switched, Switcher};
use super::replace::{self, Replace};
use super::session::{attach, begin_write, capacity, end_write, reserve_log, with_log};
use crate::domain::dispatcher::{Grant, Granted};
use crate::domain::entities::{Db, QueueSettings, position};
use crate::domain::ordering;
use crate::domain::undo::Act;
use crate::domain::unique::{Mask, State};
use crate::error::{Error, Result, SqlState};
use crate::pg::datum::{self, Bits8, ToDatum};
use crate::pg::debug_point::debug_point;
use crate::pg::xact;
use crate::store::body::{self, Body, Placed};
use crate::store::deferred::{self, Kind};
use crate::store::throttles::{Opened, Opening, Throttles};
use crate::store::{chunks, lanes, queues};

/// A job to be enqueued. None stands for the queue's default.
#[derive(Clone, Debug)]
pub struct NewJob {
    pub queue: String,
    pub priority: Option<u8>,
    pub max_attempts: Option<i16>,
    /// In the future: the job is scheduled.
    pub run_at: Option<i64>,
    /// The state it begins in, if not what `run_at` says.
    pub state: Option<State>,
    pub unique: Option<Unique>,
    /// `created_at`, `run_at`, `max_attempts` and the unique key are filled in here.
    pub body: Body,
}

impl NewJob {
    /// Available, scheduled or retryable.
    fn first_state(&self, now: i64) -> State {
        let by_time = if self.run_at.is_some_and(|at| at > now) {
            State::Scheduled
        } else {
            State::Available
        };
        self.state.unwrap_or(by_time)
    }
}

/// A key of which there may be one job at a time.
#[derive(Clone, Debug)]
pub struct Unique {
    pub key: Vec<u8>,
    pub mask: Mask,
    /// 23505 for a second job, instead of the first one's id.
    pub is_strict: bool,
    /// What a second job does to the first one, if that waits.
    pub replace: Option<Replace>,
    /// For so many microseconds after a job, no other one is accepted for its key.
    pub throttle: Option<i64>,
}

/// What became of a job that was to be enqueued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enqueued {
    pub id: i64,
    /// It was not: this is the job that holds its key.
    pub is_duplicate: bool,
}

/// A ready job that was elsewhere, on its way into its lane.
#[derive(Clone, Copy)]
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
pub fn enqueue(mut jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
    xact::ensure_writable("awa.insert_job()")?;
    let db = attach()?;
    let now = xact::micros();
    // Before anything else: nobody waits for us while we wait for a key.
    let keyed = take_keys(db, now, &mut jobs)?;
    begin_write(db)?;
    debug_point!("enqueue_begun", interruptible);
    let mut ids = vec![0; jobs.len()];
    let mut ready = Groups::default();
    let mut later = Vec::new();
    for (at, mut job) in jobs.into_iter().enumerate() {
        let job_id = match keyed.get(at) {
            Some(Enqueued { is_duplicate: true, .. }) => continue,
            Some(Enqueued { id, .. }) => Some(*id).filter(|id| *id != 0),
            None => None,
        };
        let settings = ready.settings(&job.queue)?;
        let priority = job.priority.unwrap_or(settings.priority);
        let shard = shard_of(&settings, &job.body);
        let state = job.first_state(now);
        job.body.created_at = now;
        job.body.max_attempts = job.max_attempts.unwrap_or(settings.max_attempts);
        let run_at = job.run_at.filter(|at| *at != i64::MIN);
        if state == State::Available {
            job.body.run_at = run_at.filter(|at| *at != now);
            ready.add(&job.queue, priority, shard, at, job_id, job.body);
        } else {
            let retryable = state == State::Retryable;
            let run_at = run_at.unwrap_or(now);
            later.push(Later { at, job_id, run_at, retryable, priority, shard, job });
        }
    }
    for group in ready.groups {
        write_group(db, &group, now, &mut ids)?;
    }
    if !later.is_empty() {
        defer(db, later, &mut ids)?;
    }
    debug_point!("enqueue_written", interruptible);
    end_write();
    debug_point!("enqueue_ended", interruptible);
    let enqueued = |(at, id): (usize, i64)| match keyed.get(at) {
        Some(duplicate) if duplicate.is_duplicate => *duplicate,
        _ => Enqueued { id, is_duplicate: false },
    };
    Ok(ids.into_iter().enumerate().map(enqueued).collect())
}

/// Takes the keys of those that have one, and says which of them got a job id for it or are
/// duplicates; empty when none has a key.
///
/// A key's row names its job, so such a job gets its id before it gets its place. Keys are
/// taken in one order by everybody: calls cannot deadlock among themselves.
fn take_keys(db: Db, now: i64, jobs: &mut [NewJob]) -> Result<Vec<Enqueued>> {
    if jobs.iter().all(|job| job.unique.is_none()) {
        return Ok(Vec::new());
    }
    let mut taken = vec![Enqueued::default(); jobs.len()];
    let mut opened = open_windows(db, now, jobs, &mut taken)?;
    let mut order: Vec<(Vec<u8>, usize)> = Vec::new();
    for ((at, job), so_far) in jobs.iter_mut().enumerate().zip(&taken) {
        let state = job.first_state(now);
        let Some(unique) = &job.unique else { continue };
        job.body.unique_key = Some(unique.key.as_slice().to_datum());
        job.body.unique_states = Some(Bits8(unique.mask.0).to_datum());
        if unique.mask.has(state) && !so_far.is_duplicate {
            order.push((unique.key.clone(), at));
        }
    }
    order.sort_unstable();
    let mut switcher = Switcher::new(Patience::Wait);
    for same in order.chunk_by(|a, b| a.0 == b.0) {
        let Some((key, first)) = same.first() else { continue };
        let known = taken.get(*first).map_or(0, |enqueued| enqueued.id);
        let id = if known == 0 { take_id(db)? } else { known };
        let members: Vec<usize> = same.iter().map(|(_, at)| *at).collect();
        let holder = take_key(&mut switcher, key, id, jobs, &members)?;
        debug_point!("enqueue_key_taken", interruptible);
        if holder.is_none() {
            merge(jobs, &members, now);
        } else if let Some(windows) = &mut opened {
            windows.take_back(*first)?;
        }
        for (nth, at) in members.into_iter().enumerate() {
            let is_duplicate = holder.is_some() || nth > 0;
            let id = holder.unwrap_or(id);
            let is_strict =
                jobs.get(at).and_then(|j| j.unique.as_ref()).is_some_and(|u| u.is_strict);
            if is_duplicate && is_strict {
                return Err(keys::conflict(id));
            }
            if let Some(slot) = taken.get_mut(at) {
                *slot = Enqueued { id, is_duplicate };
            }
        }
    }
    Ok(taken)
}

/// Takes the key of several jobs for this id, or returns the job that holds it, after it was
/// replaced if one of them wants that.
fn take_key(
    switcher: &mut Switcher,
    key: &[u8],
    id: i64,
    jobs: &[NewJob],
    members: &[usize],
) -> Result<Option<i64>> {
    let new = |at: &usize| {
        let job = jobs.get(*at)?;
        Some((job, job.unique.as_ref()?.replace?))
    };
    // The last one would have had the last word.
    let last = members.iter().rev().find_map(new);
    let mut ended = None;
    loop {
        let holder = match switcher.take(key, id)? {
            Switched::Done | Switched::Busy => return Ok(None),
            Switched::Lost(holder) => holder,
        };
        // One that has come to its end, and still has the key, keeps it.
        let Some((job, how)) = last.filter(|_| ended != Some(holder)) else {
            return Ok(Some(holder));
        };
        if replace::replace(holder, job, how)? {
            return Ok(Some(holder));
        }
        ended = Some(holder);
    }
}

/// Of new jobs that have one key, the first one is enqueued, with what those say that would
/// have replaced it.
fn merge(jobs: &mut [NewJob], members: &[usize], now: i64) {
    let Some((first, later)) = members.split_first() else { return };
    for at in later {
        let Some(job) = jobs.get(*at).cloned() else { continue };
        let Some(how) = job.unique.as_ref().and_then(|unique| unique.replace) else { continue };
        let state = job.first_state(now);
        let Some(kept) = jobs.get_mut(*first) else { continue };
        kept.body.args = job.body.args;
        kept.body.metadata = job.body.metadata;
        kept.body.tags = job.body.tags;
        kept.priority = job.priority;
        // Where it would not hold its key, it stays.
        if how.moves && kept.unique.as_ref().is_some_and(|unique| unique.mask.has(state)) {
            kept.run_at = job.run_at;
        }
    }
}

/// Windows of throttled keys that were opened for jobs of a call, by their places in it.
struct Windows {
    throttles: Throttles,
    opened: Vec<(usize, Vec<u8>, Opened)>,
}

impl Windows {
    /// The job is none.
    fn take_back(&mut self, at: usize) -> Result<()> {
        let found = self.opened.iter().position(|(of, ..)| *of == at);
        let Some((_, key, opened)) = found.map(|found| self.opened.swap_remove(found)) else {
            return Ok(());
        };
        self.throttles.take_back(&key, opened)
    }
}

/// Lets one job a window through for each throttled key, which gets its id. None: nothing is
/// throttled.
fn open_windows(
    db: Db,
    now: i64,
    jobs: &[NewJob],
    taken: &mut [Enqueued],
) -> Result<Option<Windows>> {
    let mut order: Vec<(&[u8], usize, i64)> = jobs
        .iter()
        .enumerate()
        .filter_map(|(at, job)| {
            let unique = job.unique.as_ref()?;
            Some((unique.key.as_slice(), at, unique.throttle?))
        })
        .collect();
    if order.is_empty() {
        return Ok(None);
    }
    order.sort_unstable();
    let mut windows = Windows { throttles: Throttles::open()?, opened: Vec::new() };
    for (key, at, window) in order {
        let id = take_id(db)?;
        let enqueued = match windows.throttles.begin(key, id, now, now.saturating_add(window))? {
            Opening::Opened(opened) => {
                windows.opened.push((at, key.to_vec(), opened));
                Enqueued { id, is_duplicate: false }
            }
            Opening::Throttled(id) => Enqueued { id, is_duplicate: true },
        };
        if let Some(slot) = taken.get_mut(at) {
            *slot = enqueued;
        }
    }
    Ok(Some(windows))
}

/// Writes the bodies of promoted jobs of one queue; their rows elsewhere are the caller's to
/// delete, in the same transaction and, if replay counts them, the same `begin_write`.
pub fn promote(queue: &str, jobs: Vec<Promoted>) -> Result<()> {
    let db = attach()?;
    let now = xact::micros();
    let mut ids = vec![0; jobs.len()];
    let mut ready = Groups::default();
    for (at, job) in jobs.into_iter().enumerate() {
        ready.add(queue, job.priority, job.shard, at, Some(job.job_id), job.body);
    }
    for group in ready.groups {
        write_group(db, &group, now, &mut ids)?;
    }
    Ok(())
}

/// Jobs with one ordering key share a shard; otherwise sessions spread over the shards of a
/// queue, and each stays on its own.
fn shard_of(settings: &QueueSettings, body: &Body) -> u8 {
    let shards = settings.shards.max(1);
    match body.ordering_key {
        Some(key) => ordering::shard(&datum::own_bytes(key), shards),
        None => (crate::pg::latch::my_pid().unsigned_abs() % u32::from(shards)) as u8,
    }
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
    /// Where both are by name: a call may name as many queues as it has jobs.
    queues: HashMap<String, Named>,
}

#[derive(Default)]
struct Named {
    settings: Option<usize>,
    /// One a priority and shard, so few.
    groups: Vec<usize>,
}

impl Groups {
    fn settings(&mut self, queue: &str) -> Result<QueueSettings> {
        // Most calls name one queue.
        if let Some((_, settings)) = self.settings.last().filter(|(name, _)| name == queue) {
            return Ok(*settings);
        }
        let known = self.queues.get(queue).and_then(|named| self.settings.get(named.settings?));
        if let Some((_, settings)) = known {
            return Ok(*settings);
        }
        let (_, at) = queues::ensure_loaded(queue)?;
        let settings = super::with(|d| d.queues.get(at).map(|q| q.settings)).unwrap_or_default();
        self.queues.entry(queue.to_owned()).or_default().settings = Some(self.settings.len());
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
        let is_it = |g: &Group| g.priority == priority && g.shard == shard && g.queue == queue;
        let last = self.groups.len().checked_sub(1);
        let known = last.filter(|&at| self.groups.get(at).is_some_and(is_it)).or_else(|| {
            let of_queue = &self.queues.get(queue)?.groups;
            of_queue.iter().copied().find(|&at| self.groups.get(at).is_some_and(is_it))
        });
        let job = (at, job_id, body);
        if let Some(group) = known.and_then(|at| self.groups.get_mut(at)) {
            group.jobs.push(job);
            return;
        }
        self.queues.entry(queue.to_owned()).or_default().groups.push(self.groups.len());
        self.groups.push(Group { queue: queue.to_owned(), priority, shard, jobs: vec![job] });
    }
}

fn write_group(db: Db, group: &Group, now: i64, ids: &mut [i64]) -> Result<()> {
    // A job waits since it was due.
    let due = group.jobs.iter().filter_map(|(_, _, body)| body.run_at).min();
    let born = due.map_or(now, |due| due.min(now));
    let mut rest = group.jobs.as_slice();
    let mut placed: Vec<Placed> = Vec::with_capacity(rest.len());
    let mut segment = None;
    while !rest.is_empty() {
        let grant = grant(db, group, rest.len(), born)?;
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
        debug_point!("enqueue_granted", interruptible);
    }
    if let Some(segment) = segment {
        body::write(segment, &placed)?;
    }
    Ok(())
}

/// Offsets of one chunk for up to `want` jobs of a lane.
fn grant(db: Db, group: &Group, want: usize, born: i64) -> Result<Grant> {
    let Group { queue, priority, shard, .. } = group;
    reserve_log(1)?;
    let subxact = xact::current_subxact();
    loop {
        let granted = super::with(|d| {
            with_log(|log| d.enqueue(db, queue, (*priority, *shard), want, born, log, subxact))
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
    debug_point!("enqueue_lane_written", interruptible);
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

struct Later {
    at: usize,
    job_id: Option<i64>,
    run_at: i64,
    /// Else scheduled.
    retryable: bool,
    priority: u8,
    shard: u8,
    job: NewJob,
}

fn defer(db: Db, jobs: Vec<Later>, ids: &mut [i64]) -> Result<()> {
    let mut rows = Vec::with_capacity(jobs.len());
    for Later { at, job_id, run_at, retryable, priority, shard, job } in jobs {
        let job_id = match job_id {
            Some(id) => id,
            None => take_id(db)?,
        };
        if let Some(id) = ids.get_mut(at) {
            *id = job_id;
        }
        rows.push(deferred::Deferred {
            job_id,
            kind: if retryable { Kind::Retryable } else { Kind::Scheduled },
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
    // A note a queue and kind: calls name few queues.
    let mut notes: Vec<(&str, bool, i32, i64)> = Vec::new();
    for row in rows {
        let retryable = row.kind == deferred::Kind::Retryable;
        let same = |n: &&mut (&str, bool, i32, i64)| n.0 == row.queue && n.1 == retryable;
        match notes.iter_mut().rev().find(same) {
            Some((_, _, count, due)) => {
                *count += 1;
                *due = row.run_at.min(*due);
            }
            None => notes.push((&row.queue, retryable, 1, row.run_at)),
        }
    }
    reserve_log(notes.len())?;
    let subxact = xact::current_subxact();
    // Before the rows: a rebuild that sees them leaves out what was noted before it began.
    super::with(|d| {
        for (queue, retryable, count, due) in notes {
            let queue = d.ensure_queue(db, queue)?;
            super::log_act(d, db, subxact, Act::Defer { queue, retryable, count, due });
        }
        Ok(())
    })
    .map_err(capacity)?;
    debug_point!("defer_noted", interruptible);
    deferred::write(rows)
}

/// 23514 unless the priority is one.
pub fn check_priority(priority: i32) -> Result<u8> {
    u8::try_from(priority).ok().filter(|p| (1..=4).contains(p)).ok_or_else(|| {
        Error::new(SqlState::CHECK_VIOLATION, "priority must be between 1 and 4")
            .detail(format!("The priority given is {priority}."))
    })
}
