//! Finding a job by its id, wherever it is, and taking it there.

use super::claim::load_chunk;
use super::close::{self, Closer, Hold};
use super::session::{capacity, confirm, reserve_log, with_log, with_open};
use crate::domain::dispatcher::{Withdraw, Withdrawn};
use crate::domain::entities::{AS_BODY, Db, SEGMENTS};
use crate::domain::undo::Act;
use crate::domain::unique::State;
use crate::error::{Error, Result, SqlState};
use crate::pg::snapshot::Snapshot;
use crate::pg::{latch, xact};
use crate::store::body::{self, Placed};
use crate::store::closures;
use crate::store::deferred::{self, Deferred, Kind};
use crate::store::jobs::{self, Job};
use crate::store::outcome::Outcome;

/// Looks at a job that is between two places before it counts as unknown.
const LOOKS: u32 = 3;
/// A wait for memory to learn what the tables show already, milliseconds; and how many.
const PAUSE: u64 = 5;
const PAUSES: u32 = 1000;

/// A job, taken by this transaction where it was.
pub enum Seized {
    /// Out of its lane, or of the timer it waited for.
    Waiting(Box<Waiting>),
    /// Its attempt is taken for closing.
    Running(Hold),
    /// Its row in `deferred_jobs` is deleted.
    Deferred(Box<Deferred>),
    /// Not taken: it has come to its end.
    Finished(Box<Job>),
    /// Not taken: this transaction has done something with it already.
    Own(Box<Job>),
    Unknown,
}

/// A job that waited in its segment.
pub struct Waiting {
    db: Db,
    generation: u64,
    pub withdrawn: Withdrawn,
    pub queue: String,
    pub placed: Placed,
}

impl Waiting {
    /// The state in which it waited.
    pub fn state(&self) -> State {
        match (self.withdrawn.timed, self.withdrawn.snoozed) {
            (false, _) => State::Available,
            (true, true) => State::Scheduled,
            (true, false) => State::Retryable,
        }
    }

    pub fn attempts(&self) -> i16 {
        match self.withdrawn.prior {
            AS_BODY => self.placed.body.attempts,
            prior => prior,
        }
    }

    /// Writes down how it ended.
    pub fn close(&self, outcome: Outcome, now: i64, reason: Option<&str>) -> Result<()> {
        let positions = [self.placed.position];
        closures::write_unclaimed(self.withdrawn.segment, &positions, now, outcome, reason)?;
        confirm(self.db, self.generation)
    }
}

/// Takes the job. Waits for open transactions that are doing something with it.
///
/// * `cancelled` - a job that waits in its segment counts as cancelled from the commit on
pub fn seize(job_id: i64, cancelled: bool) -> Result<Seized> {
    let found = look_for(job_id, cancelled, true)?;
    found.ok_or_else(|| Error::internal("an attempt was found and not taken"))
}

/// As `seize`, but leaves the job alone when an attempt has it: None.
pub fn seize_waiting(job_id: i64, cancelled: bool) -> Result<Option<Seized>> {
    look_for(job_id, cancelled, false)
}

fn look_for(job_id: i64, cancelled: bool, takes_attempts: bool) -> Result<Option<Seized>> {
    let (mut misses, mut pauses) = (0, 0);
    loop {
        let mut known = None;
        for segment in 0..SEGMENTS as u8 {
            for placed in body::find(segment, job_id, Snapshot::SelfNow)? {
                known = Some((segment, placed.position));
                match seize_placed(placed, cancelled, takes_attempts)? {
                    Seizure::Taken(seized) => return Ok(Some(seized)),
                    Seizure::Running => return Ok(None),
                    Seizure::Gone => {}
                }
            }
        }
        if let Some(row) = deferred::find(job_id, Snapshot::SelfNow)? {
            let (db, generation) = origin()?;
            if !deferred::delete(job_id)? {
                // Cancelled, or promoted, meanwhile.
                misses += 1;
                xact::ensure_seen(misses < LOOKS)?;
                continue;
            }
            let act = |queue| Act::Defer {
                queue,
                retryable: row.kind == Kind::Retryable,
                count: -1,
                due: i64::MAX,
            };
            note_row(db, generation, &row.queue, act)?;
            return Ok(Some(Seized::Deferred(Box::new(row))));
        }
        match jobs::find(job_id, Snapshot::SelfNow)? {
            Some(job) if job.state.is_terminal() => {
                return Ok(Some(Seized::Finished(Box::new(job))));
            }
            Some(job) => {
                if is_own(known, job_id)? {
                    return Ok(Some(Seized::Own(Box::new(job))));
                }
                // Memory learns of it in a moment: the callbacks of its transaction run.
                pauses += 1;
                if pauses > PAUSES {
                    return Err(super::replaying());
                }
                latch::wait(PAUSE);
            }
            None => {
                misses += 1;
                if misses >= LOOKS {
                    return Ok(Some(Seized::Unknown));
                }
            }
        }
    }
}

/// What became of an attempt to take a job at one place.
enum Seizure {
    Taken(Seized),
    /// An attempt has it, and keeps it.
    Running,
    /// It is elsewhere: look again.
    Gone,
}

fn seize_placed(placed: Placed, cancelled: bool, takes_attempts: bool) -> Result<Seizure> {
    if with_open(|d, db| d.base(db).doubts_due)? {
        // After a rebuild, a job may look taken by a subtransaction that is gone.
        super::probe_doubts();
    }
    loop {
        reserve_log(1)?;
        let who = (xact::top_xid(), xact::current_subxact());
        let (db, generation, found) = with_open(|d, db| {
            let found = with_log(|log| d.withdraw(db, placed.position, cancelled, who, log));
            (db, d.base(db).generation, found)
        })?;
        match found.map_err(capacity)? {
            Withdraw::Withdrawn(withdrawn) => {
                let queue = super::queue_name(withdrawn.queue);
                let waiting = Waiting { db, generation, withdrawn, queue, placed };
                return Ok(Seizure::Taken(Seized::Waiting(Box::new(waiting))));
            }
            Withdraw::NeedsChunk(cold) => load_chunk(db, cold.number, cold.segment)?,
            Withdraw::Running(_) if !takes_attempts => return Ok(Seizure::Running),
            Withdraw::Running(receipt) => {
                let hold = close::take(&[receipt], Closer::Operator)?;
                // Ended meanwhile: wherever the job is now, it is not there.
                if !hold.taken.is_empty() {
                    return Ok(Seizure::Taken(Seized::Running(hold)));
                }
            }
            Withdraw::Busy(xid) => {
                xact::wait_for_xid(xid);
                // It may have been prepared, so that its own backend will not report its end.
                super::probe_doubts();
            }
            Withdraw::Own | Withdraw::Absent => return Ok(Seizure::Gone),
        }
    }
}

/// Whether this transaction wrote the body, or closes the attempt.
fn is_own(known: Option<(u8, i64)>, job_id: i64) -> Result<bool> {
    let Some((segment, position)) = known else { return Ok(false) };
    if body::writer(segment, job_id, position)?.is_some_and(xact::is_current) {
        return Ok(true);
    }
    let who = (xact::top_xid(), xact::current_subxact());
    with_open(|d, db| d.is_ending(db, position, who.0))
}

/// What `note_row` wants, to be asked for before the row is changed.
pub(super) fn origin() -> Result<(Db, u64)> {
    with_open(|d, db| (db, d.base(db).generation))
}

/// Notes what this transaction did to a row that replay counts. Refused when memory was
/// rebuilt in between: replay may have counted the change, or have missed it.
pub(super) fn note_row(
    db: Db,
    generation: u64,
    queue: &str,
    act: impl Fn(u32) -> Act,
) -> Result<()> {
    reserve_log(1)?;
    let subxact = xact::current_subxact();
    super::with(|d| {
        if d.base(db).generation != generation {
            return Ok(false);
        }
        let queue = d.ensure_queue(db, queue)?;
        super::log_act(d, db, subxact, act(queue));
        Ok(true)
    })
    .map_err(capacity)?
    .then_some(())
    .ok_or_else(super::replaying)
}

/// P0002.
pub fn not_found(job_id: i64) -> Error {
    Error::new(SqlState::NOT_FOUND, format!("job {job_id} does not exist"))
        .detail("It was never enqueued, or its retention is over.")
}

/// 55000: the same transaction enqueued, claimed or closes the job.
pub fn own(job_id: i64) -> Error {
    Error::new(
        SqlState::WRONG_STATE,
        format!("job {job_id} is being changed by this very transaction"),
    )
    .hint("Commit first.")
}
