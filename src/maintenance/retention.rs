//! Failed and cancelled jobs whose retention is over.

use core::time::Duration;

use super::{Context, StepReport};
use crate::dispatch::{self, revive};
use crate::error::Result;
use crate::pg::{guc, xact};
use crate::store::done;

/// Rows a transaction.
const BATCH: usize = 1000;
/// How often they are looked for.
const LOOK: Duration = Duration::from_secs(30);
const LEAST: Duration = Duration::from_millis(100);

/// Forgets them; the totals of their queues stay.
pub fn clean_up(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let kept = guc::failed_retention();
    let pause = Some(kept.clamp(LEAST, LOOK));
    if !dispatch::is_open(db) {
        return Ok(StepReport { did: 0, next: pause });
    }
    let until = xact::micros().saturating_sub(kept.as_micros() as i64);
    let mut rows = done::read_until(until, BATCH)?;
    if rows.is_empty() {
        return Ok(StepReport { did: 0, next: pause });
    }
    let ids: Vec<i64> = rows.iter().map(|row| row.job_id).collect();
    let mut taken = done::delete(&ids)?;
    taken.sort_unstable();
    // Retried meanwhile.
    rows.retain(|row| taken.binary_search(&row.job_id).is_ok());
    let did = revive::forget(&rows)?;
    let next = if ids.len() >= BATCH { Some(Duration::ZERO) } else { pause };
    Ok(StepReport { did, next })
}
