//! Jobs outside the segments whose retention is over: failed, cancelled and completed ones, and
//! dead letters.

use core::time::Duration;
use std::collections::HashMap;

use super::{Context, StepReport};
use crate::dispatch::{self, revive};
use crate::error::Result;
use crate::pg::{guc, xact};
use crate::store::done::{self, Done};
use crate::store::{changes, descriptors, dlq, kept, queues, throttles};

/// Rows a transaction.
const BATCH: usize = 1000;
/// How often they are looked for.
const LOOK: Duration = Duration::from_secs(30);
const LEAST: Duration = Duration::from_millis(100);
/// Completed jobs are looked for no oftener, microseconds.
const PATIENT: i64 = 1_000_000;

/// Forgets them; the totals of their queues stay.
pub fn clean_up(_context: &Context) -> Result<StepReport> {
    let (failed, dead) = (clean_up_failed()?, clean_up_dead()?);
    let completed = clean_up_completed()?;
    let next = failed.next.into_iter().chain(dead.next).chain(completed.next).min();
    Ok(StepReport { did: failed.did + dead.did + completed.did, next })
}

/// How long queues keep what has ended, microseconds; negative: for ever.
struct Kept {
    common: i64,
    own: HashMap<String, Option<i64>>,
}

impl Kept {
    /// None: all keep it for ever.
    fn shortest(&self) -> Option<i64> {
        let all = self.own.values().copied().flatten().chain([self.common]);
        all.filter(|kept| *kept >= 0).min()
    }

    /// A queue without a row is one whose row is still to be restored, unless `is_new` knows
    /// better.
    fn is_over(
        &self,
        queue: &str,
        ended: i64,
        now: i64,
        is_new: impl FnOnce(&str) -> bool,
    ) -> bool {
        let own = match self.own.get(queue) {
            Some(own) => *own,
            None if is_new(queue) => None,
            None => return false,
        };
        match own.unwrap_or(self.common) {
            kept if kept < 0 => false,
            kept => ended <= now.saturating_sub(kept),
        }
    }
}

fn pause(shortest: i64) -> Option<Duration> {
    Some(Duration::from_micros(shortest as u64).clamp(LEAST, LOOK))
}

fn clean_up_completed() -> Result<StepReport> {
    let common = guc::completed_retention().map_or(-1, |kept| kept.as_micros() as i64);
    let kept = Kept { common, own: queues::completed_retentions()? };
    let idle = StepReport { did: 0, next: Some(LOOK) };
    let Some(shortest) = kept.shortest() else { return Ok(idle) };
    let now = xact::micros();
    // Each has a row: their ends were counted before they came here.
    let is_over = |queue: &str, ended: i64| kept.is_over(queue, ended, now, |_| false);
    let mut rows = kept::read_until(now.saturating_sub(shortest), BATCH, is_over)?;
    // They came here because they are kept for long: a short pause is for a short retention.
    if rows.is_empty() {
        return Ok(StepReport { did: 0, next: pause(shortest.max(PATIENT)) });
    }
    let ids: Vec<i64> = rows.iter().map(|row| row.job_id).collect();
    let mut taken = kept::take(&ids)?;
    taken.sort_unstable();
    rows.retain(|row| taken.binary_search(&row.job_id).is_ok());
    let did = revive::forget_completed(&rows)?;
    let next = if ids.len() >= BATCH { Some(Duration::ZERO) } else { pause(shortest.max(PATIENT)) };
    Ok(StepReport { did, next })
}

fn clean_up_dead() -> Result<StepReport> {
    changes::fold()?;
    throttles::sweep()?;
    descriptors::clean_up()?;
    let kept = guc::dlq_retention();
    let pause = Some(kept.clamp(LEAST, LOOK));
    let until = xact::micros().saturating_sub(kept.as_micros() as i64);
    let rows = dlq::read_until(until, BATCH)?;
    let ids: Vec<i64> = rows.iter().map(|row| row.done.job_id).collect();
    let taken = dlq::take(&ids)?;
    // Others are retried meanwhile.
    let is_taken = |row: &Done| taken.binary_search(&row.job_id).is_ok();
    let rows: Vec<Done> = rows.into_iter().map(|row| row.done).filter(is_taken).collect();
    let did = revive::forget(&rows)?;
    let next = if ids.len() >= BATCH { Some(Duration::ZERO) } else { pause };
    Ok(StepReport { did, next })
}

fn clean_up_failed() -> Result<StepReport> {
    let db = dispatch::attach()?;
    let common = guc::failed_retention().as_micros() as i64;
    let kept = Kept { common, own: queues::failed_retentions()? };
    let shortest = kept.shortest().unwrap_or(common);
    let pause = pause(shortest);
    if !dispatch::is_open(db) {
        return Ok(StepReport { did: 0, next: pause });
    }
    let now = xact::micros();
    // Memory counts the ends of a queue that has no row yet.
    let is_new = |queue: &str| dispatch::with(|d| d.queue(db, queue).is_some());
    let is_over = |queue: &str, ended: i64| kept.is_over(queue, ended, now, is_new);
    let mut rows = done::read_until(now.saturating_sub(shortest), BATCH, is_over)?;
    if rows.is_empty() {
        return Ok(StepReport { did: 0, next: pause });
    }
    let ids: Vec<i64> = rows.iter().map(|row| row.job_id).collect();
    let mut taken = done::take(&ids)?;
    taken.sort_unstable();
    // Retried meanwhile.
    rows.retain(|row| taken.binary_search(&row.job_id).is_ok());
    let did = revive::forget(&rows)?;
    let next = if ids.len() >= BATCH { Some(Duration::ZERO) } else { pause };
    Ok(StepReport { did, next })
}
