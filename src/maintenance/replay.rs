//! Rebuilding memory, and receipts for the next claims.

use core::time::Duration;

use super::{Context, StepReport};
use crate::dispatch;
use crate::error::Result;
use crate::pg::{log, xact};
use crate::store::epochs;

/// Rebuilds memory when it has to be.
pub fn run(_context: &Context) -> Result<StepReport> {
    if !dispatch::replay::is_due()? {
        return Ok(StepReport { did: 0, next: None });
    }
    let Some(replayed) = dispatch::replay::run()? else {
        return Ok(StepReport { did: 0, next: Some(Duration::from_millis(100)) });
    };
    for fault in replayed.faults.iter().take(10) {
        log::warning(&format!("awa: {fault}"));
    }
    if let Some(source) = &replayed.settled.copied_from {
        log::warning_with_hint(
            &format!("awa: this database is a copy of {source}: all its queues are paused"),
            "Call awa.resume_queue() for each queue that shall run here.",
        );
    }
    log::info(&format!("awa: replayed {} jobs, {} of them running", replayed.jobs, replayed.open));
    let did = replayed.jobs;
    dispatch::replay::finish_at_commit(replayed);
    // What was found may be due at once.
    Ok(StepReport { did, next: None })
}

/// Commits the next epoch of receipts before the current one is used up.
pub fn renew_receipts(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    if !dispatch::is_open(db) || !dispatch::with(|d| d.wants_receipts(db)) {
        return Ok(StepReport { did: 0, next: Some(Duration::from_secs(10)) });
    }
    let receipts = epochs::write_next(xact::micros())?;
    xact::force_synchronous_commit();
    dispatch::replay::renew_at_commit(db, receipts);
    Ok(StepReport { did: 1, next: Some(Duration::from_secs(1)) })
}

/// Learns how transactions ended whose own backends do not report it.
pub fn probe_doubts(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    dispatch::probe_doubts();
    let left = dispatch::with(|d| {
        d.base(db).doubts_due = false;
        d.doubts.used()
    });
    Ok(StepReport { did: 0, next: (left > 0).then_some(Duration::from_secs(1)) })
}
