//! Waiting until a job is there.

use super::session::{is_waiting, leave_wait, set_waiting, with_open};
use crate::error::{Error, Result, SqlState};
use crate::pg::debug_point::debug_point;
use crate::pg::{latch, xact};
use crate::store::queues::ensure_loaded;

/// A waiter looks after its client, and at the queues, this often, microseconds.
const LOOK: i64 = 1_000_000;

/// Brings memory to know the queues.
pub fn prepare(queues: &[String]) -> Result<()> {
    super::attach()?;
    queues.iter().try_for_each(|name| ensure_loaded(name).map(|_| ()))
}

/// Whether something can be claimed from one of the queues.
pub fn is_available(queues: &[String]) -> Result<bool> {
    let now = xact::micros();
    with_open(|d, db| {
        d.return_due(db, now, 64);
        queues.iter().filter_map(|name| d.queue(db, name)).any(|queue| d.claimable(queue) > 0)
    })
}

/// Why a sleep is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Waking {
    /// Jobs may be there.
    Look,
    /// An attempt of the owner was asked to stop: it wants to know that now.
    Asked,
}

/// Sleeps until a job was made ready in one of the queues, at most until `until`, and at
/// most a second. Who was woken for a job and does not get to `done` lets the next waiter
/// have it, also by an error.
///
/// * `runtime` - for whom, besides the runtimes that this session has registered
pub fn wait(queues: &[String], until: i64, runtime: Option<[u8; 16]>) -> Result<Waking> {
    for name in queues {
        // A queue that nobody has used is waited for all the same.
        ensure_loaded(name)?;
    }
    let (proc, pid) = (latch::my_proc_number(), latch::my_pid());
    // An abort finds us waiting from here on.
    xact::arm();
    let was_waiting = is_waiting();
    set_waiting(true);
    let mut indexes = Vec::with_capacity(queues.len());
    let started = with_open(|d, db| {
        indexes.clear();
        for name in queues {
            indexes.push(d.ensure_queue(db, name)?);
        }
        if !d.start_wait(proc, db, &indexes) {
            return Ok(Some(Waking::Look));
        }
        let is_asked = d.wait_as(proc, pid, runtime);
        if is_asked {
            d.stop_wait(proc);
        }
        Ok(is_asked.then_some(Waking::Asked))
    })?;
    if let Some(waking) = started.map_err(super::capacity)? {
        set_waiting(was_waiting && waking == Waking::Look);
        return Ok(waking);
    }
    debug_point!("wait_started", interruptible);
    let pause = (until - xact::micros()).clamp(0, LOOK);
    // Rounded up, so that the last wait does not spin.
    latch::wait((pause as u64).div_ceil(1000));
    let (woken, asked) = super::with(|d| (d.wake_up(proc), d.waiters[proc as usize].asked));
    set_waiting(woken);
    if !woken && latch::client_is_gone() {
        return Err(client_gone());
    }
    if asked {
        // A job that it was woken for as well is for the next one.
        leave_wait();
    }
    debug_point!("wait_ended", interruptible);
    Ok(if asked { Waking::Asked } else { Waking::Look })
}

/// The job that this backend was woken for has been taken.
pub fn done() {
    if is_waiting() {
        set_waiting(false);
        super::with(|d| d.stop_wait(latch::my_proc_number()));
    }
}

/// Sleeps without waiting for anything but the time.
pub fn idle(until: i64) -> Result<()> {
    let pause = (until - xact::micros()).clamp(0, LOOK);
    latch::wait((pause as u64).div_ceil(1000));
    if latch::client_is_gone() { Err(client_gone()) } else { Ok(()) }
}

/// The job this wait was woken for, if any, goes to another one.
fn client_gone() -> Error {
    leave_wait();
    Error::new(SqlState(*b"08006"), "connection to client lost")
}
