//! Giving ready jobs to a worker.

use super::close::{self, Closer};
use super::keys::{self, Patience, Switched, Switcher};
use super::ordering::Keys;
use super::session::{capacity, confirm, reserve_log, with_log, with_open};
use crate::domain::dispatcher::{self as domain, Owner, Popped, Request};
use crate::domain::entities::{AS_BODY, Db};
use crate::domain::unique::State;
use crate::error::{Error, Result};
use crate::pg::datum::{self, Datum};
use crate::pg::debug_point::debug_point;
use crate::pg::xact;
use crate::store::body::{self, Placed};
use crate::store::claims::{self, ClaimedItem, NewClaim};
use crate::store::{queues, unique};

/// Timers that a claim looks at on its way, so that a due job is not late because the
/// worker is.
const DUE_AT_ONCE: usize = 64;

/// What a worker gets.
pub struct Claimed {
    pub receipt: i64,
    pub queue: String,
    pub priority: u8,
    pub attempt: i16,
    /// Microseconds; MAX: none.
    pub deadline: i64,
    pub job: Placed,
}

pub struct Wanted<'a> {
    pub queues: &'a [String],
    pub max_jobs: usize,
    pub runtime: Option<[u8; 16]>,
    /// Microseconds; None: the job's own or the queue's.
    pub deadline: Option<i64>,
}

/// What a claim found, for `claim_outcome()`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    Claimed,
    Empty,
    Paused,
    /// There are jobs, but another attempt of their ordering key is open.
    Limited,
}

/// Looks whether there is anything to claim, without a transaction id: an idle worker
/// writes nothing.
pub fn look(wanted: &Wanted<'_>) -> Result<Outcome> {
    let now = xact::micros();
    let mut unknown: Vec<&String> = Vec::with_capacity(wanted.queues.len());
    loop {
        let seen = with_open(|d, db| {
            unknown.clear();
            d.return_due(db, now, DUE_AT_ONCE);
            check_owner(d, db, wanted.runtime)?;
            let (mut any, mut paused) = (false, !wanted.queues.is_empty());
            let mut limited = false;
            for name in wanted.queues {
                let Some(queue) = d.queue(db, name) else {
                    paused = false;
                    continue;
                };
                if !d.queues[queue].loaded {
                    unknown.push(name);
                }
                any |= d.claimable(queue) > 0;
                paused &= d.queues[queue].paused;
                limited |= d.queues[queue].blocked > 0 && !d.queues[queue].paused;
            }
            Ok::<_, Error>(if any {
                Outcome::Claimed
            } else if paused {
                Outcome::Paused
            } else if limited {
                Outcome::Limited
            } else {
                Outcome::Empty
            })
        })??;
        if unknown.is_empty() {
            return Ok(seen);
        }
        // After a start or a change, the tables have to tell what is paused.
        for name in unknown.drain(..) {
            queues::ensure_loaded(name)?;
        }
    }
}

fn check_owner(
    d: &crate::domain::dispatcher::Dispatcher<'_>,
    db: Db,
    runtime: Option<[u8; 16]>,
) -> Result<Owner> {
    let Some(id) = runtime else { return Ok(Owner::Lease) };
    match d.runtime(db, &id) {
        Some(at) if !d.runtimes[at].dead => Ok(Owner::Runtime(at)),
        _ => Err(super::runtime_gone()),
    }
}

/// Takes jobs. Rolled back, they are ready again and no attempt was used.
///
/// None: it took some that cannot run any more, and may find others behind them.
pub fn claim(wanted: &Wanted<'_>) -> Result<Option<Vec<Claimed>>> {
    let xid = xact::top_xid();
    let subxact = xact::current_subxact();
    let now = xact::micros();
    reserve_log(wanted.max_jobs)?;
    let mut popped: Vec<Popped> = Vec::with_capacity(wanted.max_jobs);
    let mut queues: Vec<u32> = Vec::with_capacity(wanted.queues.len());
    // What was popped first counts: a rebuild since then has forgotten it.
    let mut begun = None;
    let mut keys = Keys::default();
    let (db, generation) = loop {
        let by = (xid, subxact, now);
        let Some((db, generation, claimed)) = pop(wanted, by, &mut queues, &mut keys, &mut popped)?
        else {
            // They have changed since they were looked at.
            wanted.queues.iter().try_for_each(|name| queues::ensure_loaded(name).map(|_| ()))?;
            continue;
        };
        let generation = *begun.get_or_insert(generation);
        match claimed {
            domain::Claimed::All => break (db, generation),
            domain::Claimed::NeedsChunk(cold) => load_chunk(db, cold.number, cold.segment)?,
            domain::Claimed::NeedsTurns(_) => keys.sort(db)?,
            domain::Claimed::NeedsKeys { .. } => keys.read_heads(wanted.max_jobs)?,
        }
        debug_point!("claim_keys_read", interruptible);
    };
    debug_point!("claim_popped", interruptible);
    if popped.is_empty() {
        return Ok(Some(Vec::new()));
    }
    let jobs = read_bodies(&popped)?;
    debug_point!("claim_read", interruptible);
    let deadlines = describe(db, wanted, &popped, &jobs, now);
    // Not before the end of the attempt whose turn came before.
    let claimed_at = if keys.known().is_empty() { now } else { xact::micros() };
    write_claims(wanted, &popped, &jobs, &deadlines, claimed_at)?;
    debug_point!("claim_written", interruptible);
    let mut refused = switch_keys(&popped, &jobs)?;
    refused.extend(expire(&popped, &jobs, &refused, now)?);
    refused.sort_unstable();
    debug_point!("claim_keys_moved", interruptible);
    confirm(db, generation)?;
    let mut claimed = deliver(popped, jobs, &deadlines);
    if !refused.is_empty() {
        claimed.retain(|job| refused.binary_search(&job.receipt).is_err());
    }
    Ok((!claimed.is_empty()).then_some(claimed))
}

/// Cancels the jobs that nobody claimed in time, and returns their receipts. Their keys are
/// those of running jobs already.
///
/// * `ended` - receipts of jobs that came to their end already, sorted
fn expire(popped: &[Popped], jobs: &[Placed], ended: &[i64], now: i64) -> Result<Vec<i64>> {
    let is_late = |job: &Placed| job.body.expires_at.is_some_and(|at| at <= now);
    let is_fresh =
        |popped: &Popped, job: &Placed| popped.prior == AS_BODY && job.body.attempts == 0;
    let mut expired: Vec<i64> = popped
        .iter()
        .zip(jobs)
        .filter(|(popped, job)| is_late(job) && is_fresh(popped, job))
        .filter(|(popped, _)| ended.binary_search(&popped.receipt).is_err())
        .map(|(popped, _)| popped.receipt)
        .collect();
    if !expired.is_empty() {
        expired.sort_unstable();
        close::cancel(close::take(&expired, Closer::Owner)?, Some(keys::EXPIRED))?;
    }
    Ok(expired)
}

/// Moves the unique keys of jobs that start to run. A job whose key has gone to another one
/// meanwhile does not run: it is cancelled. Returns the receipts of such, sorted.
fn switch_keys(popped: &[Popped], jobs: &[Placed]) -> Result<Vec<i64>> {
    let (from, to) = (State::Available, State::Running);
    let mut moving: Vec<(Vec<u8>, &Popped, &Placed)> = Vec::new();
    for (popped, job) in popped.iter().zip(jobs) {
        if let Some((key, mask)) = unique::of_body(&job.body)
            && !mask.same(from, to)
        {
            moving.push((key, popped, job));
        }
    }
    if moving.is_empty() {
        return Ok(Vec::new());
    }
    // In the order of producers: see enqueue.
    moving.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    let mut switcher = Switcher::new(Patience::Wait);
    let mut refused = Vec::new();
    for (_, popped, job) in &moving {
        if let Switched::Lost(holder) = switcher.switch(job.job_id(), &job.body, from, to)? {
            refused.push((popped.receipt, holder));
        }
    }
    for (receipt, holder) in &refused {
        close::cancel(close::take(&[*receipt], Closer::Owner)?, Some(&keys::reason(*holder)))?;
    }
    let mut receipts: Vec<i64> = refused.iter().map(|(receipt, _)| *receipt).collect();
    receipts.sort_unstable();
    Ok(receipts)
}

/// None: the settings of the queues have to be read first.
fn pop(
    wanted: &Wanted<'_>,
    (xid, subxact, now): (u32, u32, i64),
    queues: &mut Vec<u32>,
    keys: &mut Keys,
    popped: &mut Vec<Popped>,
) -> Result<Option<(Db, u64, domain::Claimed)>> {
    with_open(|d, db| {
        let owner = check_owner(d, db, wanted.runtime)?;
        queues.clear();
        queues.extend(wanted.queues.iter().filter_map(|name| d.queue(db, name)));
        if queues.iter().any(|queue| !d.queues[*queue].loaded) {
            return Ok(None);
        }
        let request = Request {
            db,
            queues,
            want: wanted.max_jobs - popped.len(),
            owner,
            xid,
            subxact,
            now,
            deadline: wanted.deadline,
            keys: keys.known(),
        };
        let claimed = with_log(|log| d.claim(&request, popped, log)).map_err(capacity)?;
        match claimed {
            domain::Claimed::NeedsTurns(queue) => d.unsorted(queue, &mut keys.unsorted),
            domain::Claimed::NeedsKeys { lane, warm_only } => {
                d.heads(lane, warm_only, &mut keys.heads);
            }
            domain::Claimed::All | domain::Claimed::NeedsChunk(_) => {}
        }
        Ok(Some((db, d.databases[usize::from(db)].generation, claimed)))
    })?
}

/// Reads a chunk that memory dropped back from its rows.
pub fn load_chunk(db: Db, number: i64, segment: u8) -> Result<()> {
    let bits = body::read_offsets(segment, number)?;
    debug_point!("claim_cold_read", interruptible);
    match super::with(|d| d.load_chunk(db, number, &bits)).map_err(capacity)? {
        // Whoever asked for the chunk asks again.
        domain::Loaded::Ready | domain::Loaded::NotCold | domain::Loaded::Differs => Ok(()),
    }
}

fn read_bodies(popped: &[Popped]) -> Result<Vec<Placed>> {
    let mut jobs = Vec::with_capacity(popped.len());
    for run in popped.chunk_by(|a, b| a.segment == b.segment) {
        let positions: Vec<i64> = run.iter().map(|p| p.position).collect();
        jobs.extend(body::read(run[0].segment, &positions)?);
    }
    Ok(jobs)
}

fn attempt(popped: &Popped, job: &Placed) -> i16 {
    let prior = if popped.prior == AS_BODY { job.body.attempts } else { popped.prior };
    prior.saturating_add(1)
}

/// The deadline of each attempt; memory learns what only the bodies know.
fn describe(db: Db, wanted: &Wanted<'_>, popped: &[Popped], jobs: &[Placed], now: i64) -> Vec<i64> {
    let own = |job: &Placed| {
        if wanted.deadline.is_some() {
            return None;
        }
        // The column is an interval; see store::body.
        job.body.attempt_deadline.map(interval_micros)
    };
    let deadlines: Vec<i64> = popped
        .iter()
        .zip(jobs)
        .map(|(p, job)| match own(job) {
            None => p.deadline,
            Some(0) if wanted.runtime.is_some() => i64::MAX,
            Some(0) => p.deadline,
            Some(micros) => now.saturating_add(micros),
        })
        .collect();
    let special = popped.iter().zip(jobs).zip(&deadlines).any(|((p, job), deadline)| {
        *deadline != p.deadline || (p.prior == AS_BODY && job.body.attempts != 0)
    });
    let keyed: Vec<i64> = popped
        .iter()
        .zip(jobs)
        .filter(|(_, job)| job.body.unique_key.is_some())
        .map(|(p, _)| p.receipt)
        .collect();
    if !keyed.is_empty() {
        super::with(|d| keyed.iter().for_each(|receipt| d.mark_keyed(db, *receipt)));
    }
    if special {
        super::with(|d| {
            for ((p, job), deadline) in popped.iter().zip(jobs).zip(&deadlines) {
                d.describe_item(db, p.receipt, attempt(p, job) - 1, *deadline);
            }
        });
    }
    deadlines
}

fn interval_micros(datum: Datum) -> i64 {
    datum::own_interval(datum).to_micros()
}

fn write_claims(
    wanted: &Wanted<'_>,
    popped: &[Popped],
    jobs: &[Placed],
    deadlines: &[i64],
    now: i64,
) -> Result<()> {
    let items: Vec<ClaimedItem> = popped
        .iter()
        .zip(jobs)
        .zip(deadlines)
        .map(|((p, job), deadline)| ClaimedItem {
            job_id: job.job_id(),
            position: p.position,
            attempt: attempt(p, job),
            deadline: *deadline,
        })
        .collect();
    let mut rows = Vec::new();
    let mut at = 0;
    for run in popped.chunk_by(|a, b| a.claim == b.claim) {
        let items = items.get(at..at + run.len()).ok_or_else(|| Error::internal("claim cut"))?;
        rows.push(NewClaim {
            segment: run[0].segment,
            id: run[0].claim,
            lane_id: run[0].lane_id,
            priority: (run[0].effective != run[0].priority).then_some(run[0].effective),
            claimed_at: now,
            runtime: wanted.runtime,
            items,
        });
        at += run.len();
    }
    claims::write(&rows)
}

fn deliver(popped: Vec<Popped>, jobs: Vec<Placed>, deadlines: &[i64]) -> Vec<Claimed> {
    let mut names: Vec<(u32, String)> = Vec::new();
    for p in &popped {
        if names.iter().all(|(queue, _)| *queue != p.queue) {
            names.push((p.queue, super::queue_name(p.queue)));
        }
    }
    popped
        .into_iter()
        .zip(jobs)
        .zip(deadlines)
        .map(|((p, job), deadline)| Claimed {
            receipt: p.receipt,
            queue: names
                .iter()
                .find(|(queue, _)| *queue == p.queue)
                .map_or_else(String::new, |(_, name)| name.clone()),
            priority: p.priority,
            attempt: attempt(&p, &job),
            deadline: *deadline,
            job,
        })
        .collect()
}
