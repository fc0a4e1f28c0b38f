//! The ends of attempts: completed, failed, released, rescued.

use core::cell::OnceCell;
use std::collections::{HashMap, HashSet};

use super::enqueue::{self, Promoted, write_deferred};
use super::keys::{self, Patience, Switched, Switcher};
use super::session::{begin_write, confirm, end_write, reserve_log, with_log, with_open};
use crate::domain::backoff::Backoff;
use crate::domain::dispatcher::{Take, Taken, Taker};
use crate::domain::entities::{Database, Db, QueueSettings, split};
use crate::domain::undo::End;
use crate::domain::unique::State;
use crate::error::{Error, Result, SqlState};
use crate::pg::datum::{Datum, own_json};
use crate::pg::debug_point::debug_point;
use crate::pg::snapshot::Snapshot;
use crate::pg::xact;
use crate::store::body::{self, Placed};
use crate::store::closures::{self, NewClosure};
use crate::store::deferred::{Deferred, Kind};
use crate::store::dlq::{self, Dead};
use crate::store::done::{self, Done};
use crate::store::errors::{self, AttemptError};
use crate::store::outcome::Outcome;
use crate::store::{attempts, history, queues};

/// A backoff longer than this waits on disk, microseconds.
const SHORT: i64 = 60_000_000;

/// Who closes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Closer {
    /// The worker that has the receipt: refused when its runtime is dead or it is parked.
    Owner,
    /// The same about a callback: the attempt may be parked.
    Waiter,
    /// A rescue: skips what an open transaction holds, and what is parked.
    Rescue,
    /// A rescue of parked attempts whose callbacks have timed out at this time.
    Overdue(i64),
    /// Somebody who acts on the job whatever became of its worker.
    Operator,
}

impl Closer {
    fn taker(self) -> Taker {
        match self {
            Self::Owner => Taker::Owner,
            Self::Waiter => Taker::Waiter,
            Self::Rescue => Taker::Lost,
            Self::Overdue(now) => Taker::Overdue(now),
            Self::Operator => Taker::Operator,
        }
    }

    fn waits(self) -> bool {
        !matches!(self, Self::Rescue | Self::Overdue(_))
    }
}

/// The state of the job of an attempt.
pub(super) fn state_of(item: &Taken) -> State {
    if item.mark.is_parked() { State::WaitingExternal } else { State::Running }
}

/// Items this transaction is closing.
pub struct Hold {
    db: Db,
    patience: Patience,
    generation: u64,
    pub taken: Vec<Taken>,
}

impl Hold {
    /// The queue of its first item.
    pub fn queue(&self) -> String {
        self.taken.first().map_or_else(String::new, |item| super::queue_name(item.queue))
    }

    /// Its items stay as they are.
    pub fn leave(self) {
        decide(&self.taken, |_| End::Open);
    }

    /// Whether its items are parked.
    pub fn is_parked(&self) -> bool {
        self.taken.iter().all(|item| item.mark.is_parked())
    }

    /// What `confirm` wants to know.
    pub fn origin(&self) -> (Db, u64) {
        (self.db, self.generation)
    }
}

/// AW001.
pub fn stale(receipt: i64) -> Error {
    Error::new(SqlState::STALE_RECEIPT, "the receipt no longer owns its job")
        .detail(format!(
            "Receipt {receipt} was completed, failed, released, rescued or cancelled, or never issued."
        ))
        .hint("Roll back what was done for this attempt; another attempt has or had the job.")
}

/// Takes receipts for closing: all that are open at once, then the owner waits for those
/// that other transactions hold. Stale ones are left out.
///
/// * `receipts` - sorted, without repetition
pub fn take(receipts: &[i64], closer: Closer) -> Result<Hold> {
    let xid = xact::top_xid();
    let subxact = xact::current_subxact();
    let mut taken = Vec::with_capacity(receipts.len());
    let mut busy: Vec<(i64, u32)> = Vec::with_capacity(receipts.len());
    // One entry for the item, one for a release it may need.
    reserve_log(2 * receipts.len())?;
    let (taker, waits) = (closer.taker(), closer.waits());
    let mut probed = false;
    let (db, generation) = loop {
        let begun = with_open(|d, db| {
            let Database { generation, doubts_due, .. } = *d.base(db);
            if doubts_due && !probed {
                return None;
            }
            with_log(|log| {
                for receipt in receipts {
                    match d.take(db, *receipt, xid, subxact, taker, log) {
                        Take::Taken(item) => taken.push(item),
                        Take::Busy(holder) => busy.push((*receipt, holder)),
                        Take::Stale => {}
                    }
                }
            });
            Some((db, generation))
        })?;
        match begun {
            Some(begun) => break begun,
            // After a rebuild, an item may look taken by a subtransaction that is gone.
            None => super::probe_doubts(),
        }
        probed = true;
    };
    if waits {
        debug_point!("close_taken", interruptible);
        for (receipt, mut holder) in busy {
            loop {
                // Through the lock manager, so that deadlocks are seen, and lock_timeout and
                // cancels work. No lock of ours is held.
                xact::wait_for_xid(holder);
                let again = with_open(|d, db| {
                    with_log(|log| d.take(db, receipt, xid, subxact, taker, log))
                })?;
                match again {
                    Take::Taken(item) => taken.push(item),
                    Take::Busy(next) => {
                        if next == holder && !xact::is_in_progress(holder) {
                            // It ended, but its own backend will not report: it was prepared.
                            super::probe_doubts();
                        }
                        holder = next;
                        continue;
                    }
                    Take::Stale => {}
                }
                break;
            }
        }
    }
    let patience = if waits { Patience::Wait } else { Patience::Skip };
    Ok(Hold { db, patience, generation, taken })
}

/// Puts jobs into their lanes with new bodies.
fn write_ready(db: Db, mut jobs: Vec<(u32, Promoted)>) -> Result<()> {
    begin_write(db)?;
    jobs.sort_by_key(|(lane, _)| *lane);
    for run in jobs.chunk_by(|a, b| a.0 == b.0) {
        let Some((lane, _)) = run.first() else { continue };
        let (queue, shard) = lane_name(*lane);
        let jobs = run.iter().map(|(_, job)| Promoted { shard, ..*job }).collect();
        enqueue::promote(&queue, jobs)?;
    }
    end_write();
    Ok(())
}

/// The queue and the shard of a lane.
fn lane_name(lane: u32) -> (String, u8) {
    let found = super::with(|d| d.lanes.get(lane).map(|l| (l.queue, l.shard)));
    let (queue, shard) = found.unwrap_or((crate::domain::table::NIL, 0));
    (super::queue_name(queue), shard)
}

/// One closure row a claim and end: `Taken` of one claim, in the order of their items.
struct Batch {
    segment: u8,
    claim: i64,
    count: u32,
    items: Vec<u32>,
    outcome: Outcome,
    due: Option<i64>,
}

fn write_batches(mut batches: Vec<Batch>, now: i64, error: Option<&str>) -> Result<()> {
    batches.sort_by_key(|b| (b.segment, b.claim));
    for run in batches.chunk_by(|a, b| a.segment == b.segment) {
        let rows: Vec<NewClosure<'_>> = run
            .iter()
            .map(|b| NewClosure {
                claim_id: b.claim,
                count: b.count,
                items: &b.items,
                closed_at: now,
                due_at: b.due,
                outcome: b.outcome,
                error,
                result: None,
            })
            .collect();
        closures::write(run[0].segment, &rows)?;
        debug_point!("close_written", interruptible);
    }
    Ok(())
}

fn batch(batches: &mut Vec<Batch>, item: &Taken, outcome: Outcome, due: Option<i64>) {
    let number = (item.receipt - item.claim) as u32;
    let same = |b: &&mut Batch| b.claim == item.claim && b.outcome == outcome && b.due == due;
    // Items come sorted by receipt, so those of one claim come together.
    match batches.iter_mut().rev().take(4).find(same) {
        Some(batch) => batch.items.push(number),
        None => batches.push(Batch {
            segment: item.segment,
            claim: item.claim,
            count: item.count,
            items: vec![number],
            outcome,
            due,
        }),
    }
}

/// Completes what was taken.
pub fn complete(hold: Hold) -> Result<()> {
    let now = xact::micros();
    end_keys(&hold.taken, State::Completed)?;
    let mut batches = Vec::new();
    for item in &hold.taken {
        batch(&mut batches, item, Outcome::Completed, None);
    }
    write_batches(batches, now, None)?;
    decide(&hold.taken, |_| End::Completed);
    debug_point!("close_decided", interruptible);
    confirm(hold.db, hold.generation)
}

/// Completes one attempt and keeps its result.
pub fn complete_with_result(hold: Hold, result: Datum) -> Result<()> {
    let now = xact::micros();
    end_keys(&hold.taken, State::Completed)?;
    for item in &hold.taken {
        let items = [(item.receipt - item.claim) as u32];
        closures::write(
            item.segment,
            &[NewClosure {
                claim_id: item.claim,
                count: item.count,
                items: &items,
                closed_at: now,
                due_at: None,
                outcome: Outcome::Completed,
                error: None,
                result: Some(result),
            }],
        )?;
    }
    decide(&hold.taken, |_| End::Completed);
    confirm(hold.db, hold.generation)
}

/// The items whose bodies may have a unique key, or about which there may be a row, with
/// their bodies.
fn marked(taken: &[Taken]) -> Result<Vec<(Taken, Placed)>> {
    let mut items: Vec<Taken> = taken.iter().filter(|item| !is_plain(item)).copied().collect();
    items.sort_unstable_by_key(|item| item.segment);
    let mut found = Vec::with_capacity(items.len());
    for run in items.chunk_by(|a, b| a.segment == b.segment) {
        let positions: Vec<i64> = run.iter().map(|item| item.position).collect();
        found.extend(run.iter().copied().zip(body::read(run[0].segment, &positions)?));
    }
    Ok(found)
}

/// Nothing is to be looked up in other tables when the attempt ends.
fn is_plain(item: &Taken) -> bool {
    !item.keyed && !item.noted
}

/// Frees the unique keys of jobs that came to their end, or keeps them where the mask says
/// so. No rescue completes, so open transactions are waited for. Progress and callbacks are
/// forgotten, and requests to stop that came to nothing.
fn end_keys(taken: &[Taken], to: State) -> Result<()> {
    if taken.iter().all(is_plain) {
        return Ok(());
    }
    let mut switcher = Switcher::new(Patience::Wait);
    for (item, mut job) in marked(taken)? {
        if item.noted {
            attempts::forget(job.job_id(), item.receipt)?;
        }
        switcher.end(job.job_id(), &mut job.body, state_of(&item), to)?;
    }
    Ok(())
}

pub(super) fn decide(taken: &[Taken], end: impl Fn(&Taken) -> End) {
    with_log(|log| {
        for item in taken {
            log.decide(item.log, end(item));
        }
    });
}

/// Why a job has failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// No attempt is left.
    Exhausted,
    /// Its worker, or who resolved its callback, says that no other attempt would help.
    Terminal,
    /// No attempt is left, and the last one waited in vain.
    CallbackTimeout,
}

impl Cause {
    /// As dead letters say it.
    fn reason(self) -> &'static str {
        match self {
            Self::Exhausted => "max_attempts_exhausted",
            Self::Terminal => "terminal_error",
            Self::CallbackTimeout => "callback_timeout",
        }
    }
}

/// What becomes of an attempt that did not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Ready again at this time; the attempt counts.
    Retry {
        due: i64,
    },
    /// As `Retry`, and the attempt does not count.
    GiveBack {
        due: i64,
    },
    /// Scheduled until then by its worker; the attempt does not count.
    Snooze {
        due: i64,
    },
    /// Available at once, as if it had never been tried.
    Restart,
    Fail(Cause),
    /// Not a judge's: the job's unique key went to another one, and it cannot go on.
    Cancel,
    /// Not a judge's either: an open transaction has the key, so the attempt stays open.
    Skip,
}

/// Where a job goes that is to run again.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Into its lane; capacity is an error.
    Lane,
    /// Into its lane if there is a timer, else into `deferred_jobs`.
    Any,
    /// Its unique key has to move when its time comes, which takes a transaction: the
    /// promotion of deferred jobs is one, the firing of a timer is not.
    Deferred,
    /// Into its lane at once, with a new body.
    NewBody,
}

impl Verdict {
    /// Where it sends the job, and the state it is in then.
    fn target(self, job: &Placed, now: i64) -> (Place, State) {
        let place = |waiting: State| match keys::mask(&job.body) {
            Some(mask) if !mask.same(waiting, State::Available) => Place::Deferred,
            _ => Place::Any,
        };
        match self {
            Self::Retry { .. } => (place(State::Retryable), State::Retryable),
            Self::GiveBack { due } if due <= now => (Place::Lane, State::Available),
            Self::GiveBack { .. } | Self::Snooze { .. } => {
                (place(State::Scheduled), State::Scheduled)
            }
            Self::Restart => (Place::Any, State::Available),
            Self::Fail(_) => (Place::Any, State::Failed),
            Self::Cancel | Self::Skip => (Place::Any, State::Cancelled),
        }
    }
}

/// An attempt as a judge sees it.
pub struct Case<'a> {
    pub taken: &'a Taken,
    pub job: &'a Placed,
    pub attempt: i16,
    pub backoff: Backoff,
}

/// The number of the attempt. Claims tell memory about attempts that a body brought along,
/// so what memory does not know is the first.
fn attempt_of(item: &Taken) -> i16 {
    item.prior.max(0).saturating_add(1)
}

/// Ends attempts as the judge says, and tells what it said.
pub fn conclude(
    hold: Hold,
    error: Option<&str>,
    judge: impl Fn(&Case<'_>) -> Verdict,
) -> Result<Vec<Verdict>> {
    let now = xact::micros();
    let Hold { db, patience, generation, mut taken } = hold;
    let mut switcher = Switcher::new(patience);
    taken.sort_by_key(|item| (item.segment, item.receipt));
    let mut verdicts = Vec::with_capacity(taken.len());
    for run in taken.chunk_by(|a, b| a.segment == b.segment) {
        let positions: Vec<i64> = run.iter().map(|item| item.position).collect();
        let jobs = body::read(run[0].segment, &positions)?;
        let queues = settings(run)?;
        let earlier = Earlier::new(run, &jobs);
        let mut plan = Plan { db, generation, now, error, earlier, queues, ..Plan::default() };
        for (item, job) in run.iter().zip(&jobs) {
            let attempt = attempt_of(item);
            let backoff = plan.queue(item).backoff;
            let verdict = judge(&Case { taken: item, job, attempt, backoff });
            verdicts.push(plan.add(&mut switcher, item, job, attempt, verdict)?);
        }
        plan.carry_out()?;
    }
    confirm(db, generation)?;
    Ok(verdicts)
}

/// The settings of the queues of attempts, as they are now.
fn settings(taken: &[Taken]) -> Result<Vec<(u32, QueueSettings)>> {
    let mut queues: Vec<u32> = taken.iter().map(|item| item.queue).collect();
    queues.sort_unstable();
    queues.dedup();
    let mut settings = Vec::with_capacity(queues.len());
    for at in queues {
        let loaded = super::with(|d| d.queues.get(at).is_none_or(|q| q.loaded));
        if !loaded {
            queues::ensure_loaded(&super::queue_name(at))?;
        }
        let found = super::with(|d| d.queues.get(at).map(|q| q.settings));
        settings.push((at, found.unwrap_or_default()));
    }
    Ok(settings)
}

/// Cancels attempts for a reason.
pub fn cancel(hold: Hold, reason: Option<&str>) -> Result<()> {
    conclude(hold, reason, |_| Verdict::Cancel).map(|_| ())
}

/// Forgets the jobs of attempts.
pub fn forget(hold: Hold) -> Result<()> {
    let now = xact::micros();
    let mut switcher = Switcher::new(hold.patience);
    let mut batches = Vec::new();
    for (item, job) in marked(&hold.taken)? {
        switcher.drop_key(job.job_id(), &job.body, state_of(&item))?;
        attempts::forget(job.job_id(), item.receipt)?;
    }
    for item in &hold.taken {
        batch(&mut batches, item, Outcome::Moved, None);
    }
    write_batches(batches, now, None)?;
    decide(&hold.taken, |_| End::Moved);
    confirm(hold.db, hold.generation)
}

/// Makes the job of an attempt available, as if it had never been tried, unless the attempt
/// was asked to stop. Returns the label of the job's state.
pub fn restart(hold: Hold) -> Result<&'static str> {
    let verdicts = conclude(hold, None, |_| Verdict::Restart)?;
    Ok(if verdicts.contains(&Verdict::Restart) { "available" } else { "cancelled" })
}

/// Gives attempts back: none of them counts. Jobs are read only where a unique key may have
/// to move, or there may be a row about the attempt: that it was asked to stop, which cancels
/// its job, its callback, or its progress.
pub fn give_back(hold: Hold) -> Result<u64> {
    let now = xact::micros();
    let Hold { db, patience, generation, taken } = hold;
    let (with_key, plain): (Vec<Taken>, Vec<Taken>) =
        taken.into_iter().partition(|item| !is_plain(item));
    let mut given_back = 0;
    if !with_key.is_empty() {
        let hold = Hold { db, patience, generation, taken: with_key };
        let verdicts = conclude(hold, None, |_| Verdict::GiveBack { due: now })?;
        given_back += verdicts.iter().filter(|v| matches!(v, Verdict::GiveBack { .. })).count();
    }
    let mut plan = Plan { db, generation, now, ..Plan::default() };
    for item in &plain {
        if !plan.release(item, item.prior, Outcome::Released, now)? {
            return Err(super::capacity(crate::domain::dispatcher::Full::Timers));
        }
    }
    plan.carry_out()?;
    confirm(db, generation)?;
    Ok((given_back + plain.len()) as u64)
}

/// The errors of earlier attempts of a batch's jobs, which only the segment tells. It is read
/// once a batch, and only when one of those jobs leaves it.
#[derive(Default)]
struct Earlier {
    /// Of the jobs that were tried before where they are.
    positions: HashSet<i64>,
    errors: OnceCell<HashMap<i64, Vec<AttemptError>>>,
}

impl Earlier {
    fn new(taken: &[Taken], jobs: &[Placed]) -> Self {
        let was_tried =
            |item: &Taken, job: &Placed| attempt_of(item) > job.body.attempts.saturating_add(1);
        let tried = taken.iter().zip(jobs).filter(|(item, job)| was_tried(item, job));
        Self { positions: tried.map(|(item, _)| item.position).collect(), ..Self::default() }
    }

    fn of(&self, item: &Taken) -> Result<&[AttemptError]> {
        if !self.positions.contains(&item.position) {
            return Ok(&[]);
        }
        if self.errors.get().is_none() {
            let read = errors::read(item.segment, &self.positions, Snapshot::SelfNow)?;
            let _ = self.errors.set(read);
        }
        let errors = self.errors.get().and_then(|errors| errors.get(&item.position));
        Ok(errors.map_or(&[], Vec::as_slice))
    }
}

/// What a batch of attempts in one segment comes to.
#[derive(Default)]
struct Plan<'a> {
    db: Db,
    generation: u64,
    now: i64,
    error: Option<&'a str>,
    earlier: Earlier,
    ends: Vec<(usize, End)>,
    batches: Vec<Batch>,
    /// The settings of the queues of its jobs.
    queues: Vec<(u32, QueueSettings)>,
    done: Vec<(u32, Done)>,
    dead: Vec<(u32, Dead)>,
    deferred: Vec<(u32, Deferred)>,
    ready: Vec<(u32, Promoted)>,
    /// Releases under way: lane, chunk, attempts, due, snoozed.
    releases: Vec<((u32, i64, i16, i64, bool), u32)>,
}

impl Plan<'_> {
    fn queue(&self, item: &Taken) -> QueueSettings {
        let found = self.queues.iter().find(|(at, _)| *at == item.queue);
        found.map(|(_, settings)| *settings).unwrap_or_default()
    }

    /// Returns the verdict that was carried out, which the job's unique key may have
    /// changed.
    fn add(
        &mut self,
        switcher: &mut Switcher,
        item: &Taken,
        job: &Placed,
        attempt: i16,
        verdict: Verdict,
    ) -> Result<Verdict> {
        // Who has the attempt has its row: nobody else writes there meanwhile.
        let note = if item.noted {
            attempts::read(job.job_id(), item.receipt, Snapshot::SelfNow)?
        } else {
            None
        };
        let progress = note.as_ref().and_then(|note| note.progress);
        let (verdict, reason) = match item.mark.asked {
            // What was asked to stop has no other end but completion.
            true => (Verdict::Cancel, note.and_then(|note| note.cancel_reason)),
            false => (verdict, None),
        };
        let verdict = self.weigh(switcher, item, (*job, attempt), verdict, (reason, progress))?;
        if item.noted && verdict != Verdict::Skip {
            attempts::forget(job.job_id(), item.receipt)?;
        }
        Ok(verdict)
    }

    fn weigh(
        &mut self,
        switcher: &mut Switcher,
        item: &Taken,
        (mut job, attempt): (Placed, i16),
        verdict: Verdict,
        (reason, progress): (Option<String>, Option<Datum>),
    ) -> Result<Verdict> {
        let (mut place, to) = verdict.target(&job, self.now);
        if let Some(progress) = progress {
            // It goes on with the body, so the job gets a new one.
            job.body.history = history::with_progress(job.body.history, own_json(progress));
            place = if place == Place::Lane { Place::NewBody } else { Place::Deferred };
        }
        let job = &job;
        if to.is_terminal() {
            return self.end(switcher, item, (job, attempt), verdict, reason);
        }
        match switcher.switch(job.job_id(), &job.body, state_of(item), to)? {
            Switched::Busy => return Ok(self.skip(item)),
            // Who asks for it can be told.
            Switched::Lost(holder) if verdict == Verdict::Restart => {
                return Err(keys::conflict(holder));
            }
            Switched::Lost(holder) => {
                let reason = Some(keys::reason(holder));
                return self.end(switcher, item, (job, attempt), Verdict::Cancel, reason);
            }
            Switched::Done => {}
        }
        match verdict {
            Verdict::Retry { due } => {
                self.retry(item, job, attempt, Outcome::Retryable, due, place)?;
            }
            Verdict::GiveBack { due } => {
                self.retry(item, job, attempt - 1, Outcome::Released, due, place)?;
            }
            Verdict::Snooze { due } => {
                self.retry(item, job, attempt - 1, Outcome::Snoozed, due, place)?;
            }
            Verdict::Restart => self.restart(item, job, attempt)?,
            Verdict::Fail(_) | Verdict::Cancel | Verdict::Skip => {}
        }
        Ok(verdict)
    }

    /// The attempt stays open.
    fn skip(&mut self, item: &Taken) -> Verdict {
        self.ends.push((item.log, End::Open));
        Verdict::Skip
    }

    /// The job has failed, or is cancelled.
    fn end(
        &mut self,
        switcher: &mut Switcher,
        item: &Taken,
        (job, attempt): (&Placed, i16),
        verdict: Verdict,
        reason: Option<String>,
    ) -> Result<Verdict> {
        let (state, end) = match verdict {
            Verdict::Fail(_) => (State::Failed, End::Failed),
            _ => (State::Cancelled, End::Cancelled),
        };
        let grave = match verdict {
            Verdict::Fail(cause) if self.queue(item).dlq => Some(cause.reason()),
            _ => None,
        };
        let mut body = job.body;
        if !switcher.end(job.job_id(), &mut body, state_of(item), state)? {
            return Ok(self.skip(item));
        }
        body.attempts = attempt;
        body.history = history::with_error(
            self.history(item, job, attempt)?,
            attempt,
            self.now,
            reason.as_deref(),
        );
        let done = Done {
            job_id: job.job_id(),
            failed: state == State::Failed,
            finalized_at: self.now,
            attempted_at: None,
            last_receipt: Some(item.receipt),
            queue: String::new(),
            priority: item.priority,
            shard: 0,
            run_at: job.body.run_at(),
            body,
        };
        let outcome = match (grave, state) {
            (Some(reason), _) => {
                self.dead.push((item.lane, Dead { done, reason: reason.to_owned() }));
                Outcome::DeadLettered
            }
            (None, State::Failed) => {
                self.done.push((item.lane, done));
                Outcome::Failed
            }
            (None, _) => {
                self.done.push((item.lane, done));
                Outcome::Cancelled
            }
        };
        batch(&mut self.batches, item, outcome, None);
        self.ends.push((item.log, end));
        Ok(verdict)
    }

    /// The errors the body brought along, those of earlier attempts in its segment, and this
    /// one.
    fn history(&self, item: &Taken, job: &Placed, attempt: i16) -> Result<Option<Datum>> {
        let earlier = self.earlier.of(item)?;
        let history = history::with_errors(job.body.history, earlier);
        Ok(history::with_error(history, attempt, self.now, self.error))
    }

    fn retry(
        &mut self,
        item: &Taken,
        job: &Placed,
        used: i16,
        outcome: Outcome,
        due: i64,
        place: Place,
    ) -> Result<()> {
        let is_short = due - self.now <= SHORT;
        let in_place = is_short && matches!(place, Place::Lane | Place::Any);
        if in_place && self.release(item, used, outcome, due)? {
            return Ok(());
        }
        if place == Place::Lane {
            return Err(super::capacity(crate::domain::dispatcher::Full::Timers));
        }
        let mut body = job.body;
        body.attempts = used;
        body.history = self.history(item, job, used)?;
        if place == Place::NewBody {
            body.run_at = Some(body.run_at());
            let (job_id, priority) = (job.job_id(), item.priority);
            self.ready.push((item.lane, Promoted { job_id, priority, shard: 0, body }));
            batch(&mut self.batches, item, Outcome::Moved, None);
            self.ends.push((item.log, End::Moved));
            return Ok(());
        }
        self.deferred.push((
            item.lane,
            Deferred {
                job_id: job.job_id(),
                kind: if outcome == Outcome::Retryable { Kind::Retryable } else { Kind::Scheduled },
                run_at: due,
                queue: String::new(),
                priority: item.priority,
                shard: 0,
                body,
            },
        ));
        batch(&mut self.batches, item, Outcome::Moved, Some(due));
        self.ends.push((item.log, End::Moved));
        Ok(())
    }

    /// Into its lane with a body that knows of no attempts.
    fn restart(&mut self, item: &Taken, job: &Placed, attempt: i16) -> Result<()> {
        let mut body = job.body;
        body.attempts = 0;
        body.run_at = Some(self.now);
        body.history = self.history(item, job, attempt)?;
        let (job_id, priority) = (job.job_id(), item.priority);
        self.ready.push((item.lane, Promoted { job_id, priority, shard: 0, body }));
        batch(&mut self.batches, item, Outcome::Moved, None);
        self.ends.push((item.log, End::Moved));
        Ok(())
    }

    /// Ready again in place. False when timers are used up.
    fn release(&mut self, item: &Taken, used: i16, outcome: Outcome, due: i64) -> Result<bool> {
        let (chunk, offset) = split(item.position);
        let snoozed = outcome == Outcome::Snoozed;
        let key = (item.lane, chunk, used, due, snoozed);
        let known = self.releases.iter().rev().take(8).find(|(k, _)| *k == key).map(|(_, r)| *r);
        let subxact = xact::current_subxact();
        let reserved = super::with(|d| {
            if d.base(self.db).generation != self.generation {
                // The index of a release means another one now.
                return Err(super::replaying());
            }
            let release = match known {
                Some(release) => Some(release),
                None => with_log(|log| {
                    d.reserve_release(self.db, (item.lane, chunk), used, snoozed, due, log, subxact)
                }),
            };
            if let Some(release) = release {
                d.add_to_release(release, offset);
            }
            Ok(release)
        })?;
        let Some(release) = reserved else {
            return Ok(false);
        };
        if known.is_none() {
            self.releases.push((key, release));
        }
        batch(&mut self.batches, item, outcome, Some(due));
        self.ends.push((item.log, End::Released(release)));
        Ok(true)
    }

    fn carry_out(mut self) -> Result<()> {
        debug_point!("close_planned", interruptible);
        self.name_lanes();
        if !self.done.is_empty() {
            let rows: Vec<Done> = self.done.into_iter().map(|(_, row)| row).collect();
            done::write(&rows)?;
        }
        if !self.dead.is_empty() {
            let rows: Vec<Dead> = self.dead.into_iter().map(|(_, row)| row).collect();
            dlq::write(&rows)?;
        }
        if !self.deferred.is_empty() {
            let rows: Vec<Deferred> = self.deferred.into_iter().map(|(_, row)| row).collect();
            write_deferred(self.db, &rows)?;
        }
        if !self.ready.is_empty() {
            write_ready(self.db, self.ready)?;
        }
        write_batches(self.batches, self.now, self.error)?;
        with_log(|log| {
            for (entry, end) in self.ends {
                log.decide(entry, end);
            }
        });
        debug_point!("close_decided", interruptible);
        Ok(())
    }

    /// Rows outside the segments name their queue.
    fn name_lanes(&mut self) {
        if self.done.is_empty() && self.dead.is_empty() && self.deferred.is_empty() {
            return;
        }
        // Most rows of a batch are of one lane.
        let mut known: Option<(u32, String, u8)> = None;
        let mut name = |lane: u32| {
            if known.as_ref().is_none_or(|(of, ..)| *of != lane) {
                let (queue, shard) = lane_name(lane);
                known = Some((lane, queue, shard));
            }
            known.as_ref().map_or_else(Default::default, |(_, name, shard)| (name.clone(), *shard))
        };
        for (lane, row) in &mut self.done {
            (row.queue, row.shard) = name(*lane);
        }
        for (lane, row) in &mut self.dead {
            (row.done.queue, row.done.shard) = name(*lane);
        }
        for (lane, row) in &mut self.deferred {
            (row.queue, row.shard) = name(*lane);
        }
    }
}
