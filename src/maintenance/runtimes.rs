//! Runtimes that have ended: their rows say so, and go after a day.

use core::time::Duration;

use super::{Context, StepReport};
use crate::dispatch;
use crate::error::Result;
use crate::pg::xact;
use crate::store::runtimes;

/// How long they are shown.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// How often those are looked for that ended longer ago.
const LOOK: Duration = Duration::from_secs(60);
/// Rows a transaction.
const BATCH: i64 = 1000;
/// However fast runtimes come and go, their rows are looked through once in this time,
/// microseconds.
const PAUSE: i64 = 1_000_000;

/// Nothing is written at the end of a session, which cannot write any more: here it is.
pub fn note_ended(context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let now = xact::micros();
    let (noted, rest) = dispatch::with(|d| (d.base(db).ends_noted, d.base(db).ends_rest));
    let ahead = rest.saturating_sub(now).clamp(0, PAUSE);
    if !context.forced && (noted || ahead > 0 || !dispatch::is_open(db)) {
        let next = if noted { None } else { Some(Duration::from_micros(ahead as u64)) };
        return Ok(StepReport { did: 0, next });
    }
    // What ends from here on is for the next time.
    dispatch::with(|d| {
        d.base(db).ends_noted = true;
        d.base(db).ends_rest = now.saturating_add(PAUSE);
    });
    let ended = runtimes::read_living().and_then(|mut ids| {
        dispatch::with(|d| d.keep_ended(db, &mut ids));
        Ok((runtimes::end(&ids)?, ids.len() as u64))
    });
    // Others are left to whoever has them locked, and looked at again.
    let is_all = ended.as_ref().is_ok_and(|(done, of)| done == of);
    if !is_all {
        dispatch::with(|d| d.base(db).ends_noted = false);
    }
    let next = if is_all { None } else { Some(Duration::from_micros(PAUSE as u64)) };
    Ok(StepReport { did: ended?.0, next })
}

/// Removes the rows of those that ended a day ago.
pub fn forget_ended(_context: &Context) -> Result<StepReport> {
    let until = xact::micros().saturating_sub(KEPT.as_micros() as i64);
    let did = runtimes::forget_until(until, BATCH)?;
    let next = if did >= BATCH as u64 { Duration::ZERO } else { LOOK };
    Ok(StepReport { did, next: Some(next) })
}
