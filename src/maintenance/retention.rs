//! Failed and cancelled jobs, and dead letters, whose retention is over.

use core::time::Duration;

use super::{Context, StepReport};
use crate::dispatch::{self, revive};
use crate::error::Result;
use crate::pg::{guc, xact};
use crate::store::done::{self, Done};
use crate::store::{changes, dlq, queues, throttles};

/// Rows a transaction.
const BATCH: usize = 1000;
/// How often they are looked for.
const LOOK: Duration = Duration::from_secs(30);
const LEAST: Duration = Duration::from_millis(100);

/// Forgets them; the totals of their queues stay.
pub fn clean_up(_context: &Context) -> Result<StepReport> {
    let (failed, dead) = (clean_up_failed()?, clean_up_dead()?);
    let next = failed.next.into_iter().chain(dead.next).min();
    Ok(StepReport { did: failed.did + dead.did, next })
}

fn clean_up_dead() -> Result<StepReport> {
    changes::fold()?;
    throttles::sweep()?;
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
    let kept = guc::failed_retention();
    let own = queues::failed_retentions()?;
    let shortest = own.values().copied().filter(|kept| *kept >= 0).min();
    let shortest = shortest.map_or(kept, |own| kept.min(Duration::from_micros(own as u64)));
    let pause = Some(shortest.clamp(LEAST, LOOK));
    if !dispatch::is_open(db) {
        return Ok(StepReport { did: 0, next: pause });
    }
    let now = xact::micros();
    let kept = kept.as_micros() as i64;
    let shortest = shortest.as_micros() as i64;
    let is_over = |queue: &str, ended: i64| match own.get(queue).copied().unwrap_or(kept) {
        kept if kept < 0 => false,
        kept => ended <= now.saturating_sub(kept),
    };
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
