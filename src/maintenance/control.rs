//! Halts by operators: looked for, obeyed, and said to be obeyed.

use core::time::Duration;

use super::{Context, StepReport};
use crate::dispatch;
use crate::error::Result;
use crate::pg::{log, xact};
use crate::store::{controls, segments};

pub const LOOK: Duration = Duration::from_secs(1);

/// Whether a step that prunes may run now. It reads the table itself: from the commit of a halt
/// on none begins.
pub fn may_prune() -> Result<bool> {
    // The lock first: who halts after we looked finds us in the step.
    Ok(controls::try_enter()? && controls::read(controls::PRUNE)?.is_none())
}

/// Tells that the worker obeys the halt there is. A halt is obeyed once nobody is in a step
/// that began before it.
pub fn look(context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let report = StepReport { did: 0, next: Some(LOOK) };
    if context.forced || !dispatch::is_open(db) {
        return Ok(report);
    }
    let halt = controls::read(controls::PRUNE)?.map(|halt| halt.id);
    if halt.is_some() && !controls::is_quiet()? {
        return Ok(report);
    }
    let now = xact::micros();
    let former = dispatch::with(|d| {
        let database = d.base(db);
        database.halt_seen_at = now;
        core::mem::replace(&mut database.halt_seen, halt)
    });
    if former != halt {
        let bytes = segments::disk_bytes()?;
        dispatch::with(|d| {
            let database = d.base(db);
            (database.halted_at, database.halted_bytes) = (now, bytes);
        });
        log::info(match halt {
            Some(_) => "awa: pruning is halted by an operator",
            None => "awa: pruning goes on",
        });
    }
    Ok(report)
}
