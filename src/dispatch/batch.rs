//! Bulk enqueues that hold keys while they wait for others.
//!
//! A batch takes its keys in one order, so batches cannot deadlock among themselves. A
//! transaction that takes keys one by one, in an order of its own, can: it waits for a key of the
//! batch, which waits for one of its. So for a while the batch waits only shortly, and then lets
//! go of everything it holds and tries again: the other one gets its key, commits, and the
//! batch finds what became of it.

use core::time::Duration;

use super::enqueue::{Enqueued, NewJob, enqueue};
use crate::error::{Result, SqlState};
use crate::pg::{spi, xact};

/// How long a batch lets others go first, microseconds.
const COURTEOUS: i64 = 2_000_000;
/// The longest of its waits meanwhile.
const PATIENCE: Duration = Duration::from_millis(500);

/// As `enqueue`, for many jobs with keys. The caller's own lock_timeout holds for each wait.
pub fn enqueue_courteously(jobs: &[NewJob]) -> Result<Vec<Enqueued>> {
    if jobs.iter().all(|job| job.unique.is_none()) {
        return enqueue(jobs.to_vec());
    }
    let began = xact::micros();
    // Others look for deadlocks after this long: we must have let go before.
    let patience = PATIENCE.min(xact::deadlock_timeout() / 2).max(Duration::from_millis(1));
    let own = xact::lock_timeout();
    if own.is_some_and(|own| own <= patience) {
        return enqueue(jobs.to_vec());
    }
    while xact::micros() - began < COURTEOUS {
        let tried = xact::attempt(|| spi::with_lock_timeout(patience, || enqueue(jobs.to_vec())));
        match tried {
            Err(error) if error.code == SqlState::LOCK_NOT_AVAILABLE => {
                let waited = Duration::from_micros(xact::micros().abs_diff(began));
                if own.is_some_and(|own| waited >= own) {
                    return Err(error);
                }
            }
            done => return done,
        }
    }
    enqueue(jobs.to_vec())
}
