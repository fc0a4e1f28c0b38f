//! Callbacks: attempts that wait for somebody outside, and what becomes of them.
//!
//! Whoever does something takes the attempt first and reads its row then, so of two who
//! resolve one callback the second finds it gone.

use super::close::{self, Cause, Closer, Hold, Verdict};
use super::keys::{self, Patience, Switched, Switcher};
use super::session::{confirm, with_open};
use crate::domain::dispatcher::Taken;
use crate::domain::undo::End;
use crate::domain::unique::State;
use crate::error::{Error, Result, SqlState};
use crate::pg::datum::{Datum, Uuid};
use crate::pg::debug_point::debug_point;
use crate::pg::snapshot::Snapshot;
use crate::pg::xact;
use crate::store::attempts::{self, Note};
use crate::store::body::{self, Placed};
use crate::store::queues;

/// Looks at a token whose attempt somebody else ends at the same time.
const LOOKS: u32 = 3;

/// An attempt that this transaction has taken.
struct Attempt {
    hold: Hold,
    item: Taken,
    job: Placed,
    note: Note,
}

/// P0002.
fn not_found(id: &Uuid) -> Error {
    let id = uuid::Uuid::from_bytes(*id);
    Error::new(SqlState::NOT_FOUND, format!("callback {id} does not exist"))
        .detail("It was never registered, was replaced by a later one, or is resolved.")
}

/// 55000.
fn wrong_state(message: &'static str) -> Error {
    Error::new(SqlState::WRONG_STATE, message)
}

fn not_parked() -> Error {
    wrong_state("the attempt of the callback is running")
        .hint("It has not called awa.wait_for_callback() yet.")
}

impl Attempt {
    fn of(hold: Hold, receipt: i64, may: impl Fn(&str) -> Result<()>) -> Result<Self> {
        may(&hold.queue())?;
        let Some(item) = hold.taken.first().copied() else { return Err(close::stale(receipt)) };
        let job = body::read(item.segment, &[item.position])?.into_iter().next();
        let job = job.ok_or_else(|| Error::internal("an attempt has no job"))?;
        let note = attempts::read(job.job_id(), receipt, Snapshot::SelfNow)?.unwrap_or_default();
        Ok(Self { hold, item, job, note })
    }

    fn of_receipt(receipt: i64, may: impl Fn(&str) -> Result<()>) -> Result<Self> {
        let hold = close::take(&[receipt], Closer::Waiter)?;
        if hold.taken.is_empty() {
            return Err(close::stale(receipt));
        }
        Self::of(hold, receipt, may)
    }

    /// None: no attempt has this callback any more.
    fn find(id: &Uuid, may: impl Fn(&str) -> Result<()>) -> Result<Option<Self>> {
        for _ in 0..LOOKS {
            let Some((_, receipt)) = attempts::of_callback(id)? else { return Ok(None) };
            debug_point!("callback_found", interruptible);
            let hold = close::take(&[receipt], Closer::Operator)?;
            if hold.taken.is_empty() {
                // Ended meanwhile.
                continue;
            }
            let attempt = Self::of(hold, receipt, &may)?;
            if attempt.note.callback_id == Some(*id) {
                return Ok(Some(attempt));
            }
            attempt.hold.leave();
        }
        Ok(None)
    }

    fn of_callback(id: &Uuid, may: impl Fn(&str) -> Result<()>) -> Result<Self> {
        Self::find(id, may)?.ok_or_else(|| not_found(id))
    }

    fn is_parked(&self) -> bool {
        self.item.mark.is_parked()
    }

    fn write(&self, change: impl FnOnce(&mut Note)) -> Result<()> {
        let note = attempts::write(self.job.job_id(), self.item.receipt, change)?;
        debug_point!("callback_written", interruptible);
        close::decide(&self.hold.taken, |_| End::Kept(note.mark()));
        let (db, generation) = self.hold.origin();
        confirm(db, generation)
    }

    /// Its job's unique key goes with the change of state, or the change is refused.
    fn switch(&self, to: State) -> Result<()> {
        let from = close::state_of(&self.item);
        let mut switcher = Switcher::new(Patience::Wait);
        match switcher.switch(self.job.job_id(), &self.job.body, from, to)? {
            Switched::Lost(holder) => Err(keys::conflict(holder)),
            Switched::Done | Switched::Busy => Ok(()),
        }
    }
}

/// Gives the attempt a new token; an earlier one is good for nothing from then on.
///
/// * `timeout` - microseconds
pub fn register(receipt: i64, timeout: i64, may: impl Fn(&str) -> Result<()>) -> Result<Uuid> {
    let id = *uuid::Uuid::new_v4().as_bytes();
    let attempt = Attempt::of_receipt(receipt, may)?;
    attempt.write(|note| {
        note.callback_id = Some(id);
        note.callback_timeout_at = Some(xact::micros().saturating_add(timeout));
        note.resumed = false;
    })?;
    Ok(id)
}

/// Parks the attempt, unless its callback has been resumed already.
pub fn wait(receipt: i64, may: impl Fn(&str) -> Result<()>) -> Result<()> {
    let attempt = Attempt::of_receipt(receipt, may)?;
    if attempt.is_parked() || (attempt.note.callback_id.is_none() && attempt.note.resumed) {
        attempt.hold.leave();
        return Ok(());
    }
    if attempt.note.callback_id.is_none() {
        return Err(wrong_state("the attempt has no callback to wait for")
            .hint("Call awa.register_callback() first."));
    }
    attempt.switch(State::WaitingExternal)?;
    attempt.write(|note| {
        note.parked = true;
        note.leased = false;
    })
}

/// Completes the job, with a result if there is a payload.
pub fn complete(
    id: &Uuid,
    payload: Option<Datum>,
    may: impl Fn(&str) -> Result<()>,
) -> Result<&'static str> {
    let attempt = Attempt::of_callback(id, may)?;
    match payload {
        None => close::complete(attempt.hold)?,
        Some(payload) => close::complete_with_result(attempt.hold, payload)?,
    }
    Ok("completed")
}

/// The job has failed for good.
pub fn fail(id: &Uuid, error: &str, may: impl Fn(&str) -> Result<()>) -> Result<&'static str> {
    let attempt = Attempt::of_callback(id, may)?;
    let verdicts = close::conclude(attempt.hold, Some(error), |_| Verdict::Fail(Cause::Terminal))?;
    Ok(if let Some(Verdict::Fail(_)) = verdicts.first() { "failed" } else { "cancelled" })
}

/// Makes the job of a parked attempt available, as if it had never been tried.
pub fn retry(id: &Uuid, may: impl Fn(&str) -> Result<()>) -> Result<&'static str> {
    let attempt = Attempt::of_callback(id, may)?;
    if !attempt.is_parked() {
        return Err(not_parked());
    }
    close::restart(attempt.hold)
}

/// The attempt goes on, with its receipt: in the care of its owner if that lives, else until
/// a deadline.
pub fn resume(id: &Uuid, payload: Option<Datum>, may: impl Fn(&str) -> Result<()>) -> Result<i64> {
    let attempt = Attempt::of_callback(id, may)?;
    // Memory takes a fresh deadline from them at commit.
    queues::ensure_loaded(&attempt.hold.queue())?;
    attempt.switch(State::Running)?;
    attempt.write(|note| {
        note.callback_id = None;
        note.callback_timeout_at = None;
        note.callback_result = payload;
        note.resumed = true;
        if attempt.is_parked() {
            note.parked = false;
            note.leased = !attempt.item.owned;
        }
    })?;
    Ok(attempt.item.receipt)
}

/// The callback of a parked attempt times out later (or earlier), and when.
///
/// * `timeout` - microseconds from now
pub fn heartbeat(id: &Uuid, timeout: i64, may: impl Fn(&str) -> Result<()>) -> Result<i64> {
    let attempt = Attempt::of_callback(id, may)?;
    if !attempt.is_parked() {
        return Err(not_parked());
    }
    let until = xact::micros().saturating_add(timeout);
    attempt.write(|note| note.callback_timeout_at = Some(until))?;
    Ok(until)
}

/// Takes the token back; false where there is none any more.
pub fn cancel(id: &Uuid, may: impl Fn(&str) -> Result<()>) -> Result<bool> {
    let Some(attempt) = Attempt::find(id, may)? else { return Ok(false) };
    if attempt.is_parked() {
        return Err(wrong_state("the attempt of the callback waits for it")
            .hint("Resolve the callback, or end the job with awa.cancel_job()."));
    }
    attempt.write(|note| {
        note.callback_id = None;
        note.callback_timeout_at = None;
    })?;
    Ok(true)
}

/// What the last callback that was resumed brought to an open attempt.
pub fn result(receipt: i64, may: impl Fn(&str) -> Result<()>) -> Result<Option<Datum>> {
    let place = with_open(|d, db| {
        let item = &d.items[d.item(db, receipt)?];
        Some((d.claims[item.claim].segment, item.position, d.queue_of(db, receipt)?))
    })?;
    let Some((segment, position, queue)) = place else { return Err(close::stale(receipt)) };
    may(&super::queue_name(queue))?;
    let Some(job_id) = body::job_id_at(segment, position)? else {
        return Err(close::stale(receipt));
    };
    let note = attempts::read(job_id, receipt, Snapshot::SelfNow)?;
    Ok(note.and_then(|note| note.callback_result))
}
