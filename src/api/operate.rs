//! maintain, check, rebuild, ensure_claim_batch_job_index, and the trigger on the leaves.

use std::time::Instant;

use super::access;
use super::args::required;
use crate::dispatch;
use crate::domain::undo::Act;
use crate::error::{Error, Result, SqlState};
use crate::maintenance::{Context, STEPS, index};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::catalog::{self, Leaf};
use crate::pg::datum::{Interval, ToDatum};
use crate::pg::{latch, log, role, spi, trigger, xact};
use crate::store::acl::{self, Profile};
use crate::store::claim_index::{self, Found};
use crate::store::segments;

sql_function!(awa_maintain, maintain);
sql_function!(awa_check, check);
sql_function!(awa_rebuild, rebuild);
sql_function!(awa_ensure_claim_batch_job_index, ensure_index);
sql_function!(awa_foreign_rows, foreign_rows);
sql_function!(awa_replace_segment, replace_segment);

/// How long `rebuild` waits for the worker, microseconds.
const PATIENCE: i64 = 60_000_000;

fn maintain(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.maintain()")?;
    access::check("", Profile::Operator)?;
    let (database, extension) = catalog::identity()?;
    let context = Context { database, extension, forced: true };
    let mut rows = call.rows()?;
    for step in STEPS {
        let began = Instant::now();
        let report = step.perform(&context)?;
        let took = Interval::of_micros(began.elapsed().as_micros() as i64);
        rows.push(&[
            Some(step.name.to_datum()),
            Some((report.did as i64).to_datum()),
            Some(took.to_datum()),
        ])?;
    }
    Ok(Returned::Void)
}

fn check(call: &mut Call) -> Result<Returned> {
    if xact::is_in_recovery() {
        return Err(Error::new(
            SqlState::READ_ONLY_TRANSACTION,
            "cannot compare memory with the tables during recovery",
        ));
    }
    access::check("", Profile::Operator)?;
    let findings = dispatch::check::run()?;
    let mut rows = call.rows()?;
    for finding in findings {
        rows.push(&[
            Some(finding.invariant.to_datum()),
            Some(finding.faults.is_empty().to_datum()),
            (!finding.faults.is_empty()).then(|| finding.faults.join("; ").to_datum()),
        ])?;
    }
    Ok(Returned::Void)
}

fn rebuild(_call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.rebuild()")?;
    if !access::is_master()? {
        return Err(Error::new(
            SqlState::INSUFFICIENT_PRIVILEGE,
            "permission denied to rebuild the dispatcher",
        ));
    }
    let db = dispatch::attach()?;
    let before = dispatch::replay::request(db);
    let until = xact::micros() + PATIENCE;
    while !dispatch::replay::is_done_since(db, before) {
        if xact::micros() >= until {
            return Err(dispatch::replaying());
        }
        latch::wait(20);
    }
    Ok(Returned::Void)
}

/// Makes the index by which the claims of one job are found in a segment, unless it is there.
///
/// Argument: claim_slot, the segment. Result: whether it is there now; false for the current
/// segment, where it would cost more than it saves, while somebody claims jobs of the segment,
/// and, with a warning, where something else has its name. Errors: 22023 for another number,
/// 42501 unless the caller may truncate the table.
fn ensure_index(call: &mut Call) -> Result<Returned> {
    let slot = required(call.i32(0), "claim_slot")?;
    let segment =
        u8::try_from(slot).ok().filter(|at| *at < catalog::SEGMENTS).ok_or_else(|| {
            let last = catalog::SEGMENTS - 1;
            Error::invalid(format!("claim_slot must be between 0 and {last}"))
        })?;
    xact::ensure_writable("awa.ensure_claim_batch_job_index()")?;
    if !role::may_truncate(catalog::leaf(Leaf::Claims, segment)?) {
        return Err(Error::new(
            SqlState::INSUFFICIENT_PRIVILEGE,
            format!("permission denied for table lease_claim_batches_{segment}"),
        )
        .detail("Only roles with the privilege TRUNCATE may index it."));
    }
    acl::serialize()?;
    claim_index::refresh_execute()?;
    if segments::is_current(segment)? {
        return Ok(Returned::value(false));
    }
    let found = claim_index::ensure(segment)?;
    if found == Found::Taken {
        log::warning(&index::taken(segment));
    }
    Ok(Returned::value(matches!(found, Found::Present | Found::Made)))
}

/// Rows that did not come through our functions reach memory through a replay.
fn foreign_rows(call: &mut Call) -> Result<Returned> {
    trigger::ensure(call)?;
    if spi::is_own() {
        return Ok(Returned::Void);
    }
    segments::distrust()?;
    let db = dispatch::attach()?;
    dispatch::reserve_log(1)?;
    let subxact = xact::current_subxact();
    dispatch::with(|d| dispatch::log_act(d, db, subxact, Act::Foreign));
    // No row is a null pointer, which is not the same as NULL (trigger.c).
    Ok(Returned::Void)
}

/// A restored row of a segment takes the place of the one that the worker wrote.
fn replace_segment(call: &mut Call) -> Result<Returned> {
    let row = trigger::row(call)?;
    if !spi::is_own()
        && let Some(segment) = row.i16(1)
    {
        segments::remove(segment)?;
    }
    Ok(Returned::Value(row.datum()))
}
