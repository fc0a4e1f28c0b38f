//! What a worker says about an attempt while it runs.

use serde_json::Value;

use super::close::{self, Closer};
use super::session::confirm;
use crate::domain::undo::End;
use crate::error::{Error, Result};
use crate::pg::datum::{ToDatum, own_json};
use crate::pg::debug_point::debug_point;
use crate::store::{attempts, body, history};

/// Writes down how far an attempt has come, or raises AW001. Who closes the attempt waits
/// for the end of this transaction, which may go on and close it itself.
///
/// * `may` - refuses a caller who may not work on the queue
/// * `change` - what it is now, from what was said before about the job
pub fn set(
    receipt: i64,
    may: impl Fn(&str) -> Result<()>,
    change: impl FnOnce(Option<Value>) -> Value,
) -> Result<()> {
    let hold = close::take(&[receipt], Closer::Owner)?;
    let item = *hold.taken.first().ok_or_else(|| close::stale(receipt))?;
    may(&hold.queue())?;
    debug_point!("progress_noted", interruptible);
    let jobs = body::read(item.segment, &[item.position])?;
    let job = jobs.first().ok_or_else(|| Error::internal("an attempt has no job"))?;
    let note = attempts::write(job.job_id(), receipt, |note| {
        let before = note.progress.map(own_json);
        let before = before.or_else(|| history::progress(job.body.history));
        note.progress = Some(change(before).to_datum());
    })?;
    close::decide(&hold.taken, |_| End::Kept(note.mark()));
    let (db, generation) = hold.origin();
    confirm(db, generation)
}
