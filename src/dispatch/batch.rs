//! Bulk enqueues that hold keys while they wait for others.
//!
//! A batch takes its keys in one order, so batches cannot deadlock among themselves. A
//! transaction that takes keys one by one, in an order of its own, can: it waits for a key of the
//! batch, which waits for one of its. So the batch waits only shortly while it holds keys. Then it
//! lets go of all of them, waits for the other one with empty hands, for as long as that takes,
//! and tries again: the other one gets its keys, commits, and the batch finds what became of
//! them.

use core::time::Duration;

use super::enqueue::{Enqueued, NewJob, enqueue};
use crate::error::{Result, SqlState};
use crate::pg::{spi, xact};
use crate::store::unique;

/// How long a batch waits in all while it holds keys, before it waits as anybody: those who come
/// one after the other are not to keep it from ever getting its turn.
const COURTEOUS: Duration = Duration::from_secs(2);
/// The longest of its waits meanwhile.
const PATIENCE: Duration = Duration::from_millis(500);

/// As `enqueue`, for many jobs with keys. The caller's own lock_timeout holds for each wait.
pub fn enqueue_courteously(jobs: Vec<NewJob>) -> Result<Vec<Enqueued>> {
    // Who waits for the only one holds none.
    if jobs.iter().filter(|job| job.unique.is_some()).nth(1).is_none() {
        return enqueue(jobs);
    }
    // Others look for deadlocks after this long: we must have let go before.
    let patience = PATIENCE.min(xact::deadlock_timeout() / 2).max(Duration::from_millis(1));
    let own = xact::lock_timeout();
    if own.is_some_and(|own| own <= patience) {
        return enqueue(jobs);
    }
    let mut waited = Duration::ZERO;
    while waited < COURTEOUS {
        let _ = unique::take_awaited();
        let tried = xact::attempt(|| spi::with_lock_timeout(patience, || enqueue(jobs.clone())));
        match tried {
            Err(error) if error.code == SqlState::LOCK_NOT_AVAILABLE => {
                waited += patience;
                let Some(xid) = unique::take_awaited() else { continue };
                match own {
                    None => xact::wait_for_xid(xid),
                    Some(own) => {
                        let left = (own - patience).max(Duration::from_millis(1));
                        xact::attempt(|| {
                            spi::with_lock_timeout(left, || {
                                xact::wait_for_xid(xid);
                                Ok(())
                            })
                        })?;
                    }
                }
            }
            done => return done,
        }
    }
    enqueue(jobs)
}
