//! What a worker says about an attempt while it runs.

use serde_json::Value;

use super::close;
use super::session::{confirm, with_open};
use crate::domain::dispatcher::Take;
use crate::error::{Error, Result};
use crate::pg::debug_point::debug_point;
use crate::pg::xact;
use crate::store::{attempts, body, history};

/// Writes down how far an attempt has come, or raises AW001. Who closes the attempt waits
/// for the end of this transaction.
///
/// * `may` - refuses a caller who may not work on the queue
/// * `change` - what it is now, from what was said before about the job
pub fn set(
    receipt: i64,
    may: impl Fn(&str) -> Result<()>,
    change: impl FnOnce(Option<Value>) -> Value,
) -> Result<()> {
    let xid = xact::top_xid();
    let (db, generation, noted) = loop {
        let (db, generation, found) = with_open(|d, db| {
            let found = d.note_item(db, receipt, xid);
            (db, d.base(db).generation, found)
        })?;
        match found {
            Ok(noted) => break (db, generation, noted),
            Err(Take::Busy(holder)) => {
                xact::wait_for_xid(holder);
                with_open(|d, db| d.end_note(db, receipt, holder))?;
                // It may have been prepared, so that its own backend will not report its end.
                super::probe_doubts();
            }
            Err(_) => return Err(close::stale(receipt)),
        }
    };
    may(&super::queue_name(noted.queue))?;
    debug_point!("progress_noted", interruptible);
    let jobs = body::read(noted.segment, &[noted.position])?;
    let job = jobs.first().ok_or_else(|| Error::internal("an attempt has no job"))?;
    attempts::set_progress(job.job_id(), receipt, |before| {
        change(before.or_else(|| history::progress(job.body.history)))
    })?;
    confirm(db, generation)
}
