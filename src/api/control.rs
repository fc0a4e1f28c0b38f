//! halt_runtime_scope, resume_runtime_scope, runtime_control_status.

use uuid::Uuid;

use super::access;
use super::args::required;
use crate::dispatch;
use crate::error::{Error, Result};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{Timestamp, ToDatum};
use crate::pg::{log, xact};
use crate::store::acl::Profile;
use crate::store::{controls, segments};

sql_function!(awa_halt_runtime_scope, halt);
sql_function!(awa_resume_runtime_scope, resume);
sql_function!(awa_runtime_control_status, status);

/// A worker whose last look is older has not said anything about now, microseconds.
const RECENT: i64 = 5_000_000;

fn scope(call: &Call, i: usize) -> Result<String> {
    match call.text(i) {
        None => Ok(controls::PRUNE.to_owned()),
        Some(scope) if scope == controls::PRUNE => Ok(scope),
        Some(scope) => Err(Error::invalid(format!("unknown scope \"{scope}\""))
            .hint(format!("The only scope is {}.", controls::PRUNE))),
    }
}

/// Stops a part of maintenance, durably: what runs ends, nothing new begins.
///
/// Arguments: scope, mode (drain), reason. Result: the id of the halt, which resume wants.
/// A halt in force is replaced. Errors: 22023 for an unknown scope or mode.
fn halt(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.halt_runtime_scope()")?;
    access::check("", Profile::Operator)?;
    let scope = scope(call, 0)?;
    let mode = call.text(1).unwrap_or_else(|| "drain".to_owned());
    if mode != "drain" {
        return Err(
            Error::invalid(format!("unknown mode \"{mode}\"")).hint("The only mode is drain.")
        );
    }
    let id = *Uuid::new_v4().as_bytes();
    controls::halt(&scope, id, &mode, call.text(2).as_deref())?;
    Ok(Returned::value(id))
}

/// Ends a halt.
///
/// Arguments: scope, halt_id. Result: false, and nothing changed, unless that halt is in force.
fn resume(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.resume_runtime_scope()")?;
    access::check("", Profile::Operator)?;
    let scope = scope(call, 0)?;
    let id = required(call.uuid(1), "halt_id")?;
    let resumed = controls::resume(&scope, id)?;
    // A halt that is younger than this transaction's snapshot.
    let in_force = || Ok(controls::read(&scope)?.is_some_and(|halt| halt.id == id));
    xact::ensure_seen(resumed || !in_force()?)?;
    Ok(Returned::value(resumed))
}

/// What is asked of a scope, and what each process says that works in it: in this system the
/// worker of the database, one row. The fleet is halted once no step is under way and none
/// will begin.
fn status(call: &mut Call) -> Result<Returned> {
    access::check_any(&[Profile::Operator, Profile::Reader])?;
    let scope = scope(call, 0)?;
    let mut rows = call.rows()?;
    let halt = controls::read(&scope)?;
    let now = xact::micros();
    let (worker, seen, seen_at, since) = dispatch::with_open(|d, db| {
        let database = d.base(db);
        let since = (database.halted_at, database.halted_bytes);
        (database.worker != 0, database.halt_seen, database.halt_seen_at, since)
    })?;
    let is_recent = seen_at != 0 && now.saturating_sub(seen_at) < RECENT;
    let asked = halt.as_ref().map(|halt| halt.id);
    let observed = match (is_recent, asked.is_some() && asked == seen) {
        (false, _) => None,
        (true, true) => Some("halted"),
        (true, false) => Some("running"),
    };
    // Without a worker nothing is under way but what somebody does by hand.
    let fleet_halted =
        halt.is_some() && if worker { observed == Some("halted") } else { controls::is_quiet()? };
    if observed == Some("halted") {
        tell_growth(since, now)?;
    }
    rows.push(&[
        Some(scope.to_datum()),
        Some(if halt.is_some() { "halted" } else { "running" }.to_datum()),
        asked.map(|id| id.to_datum()),
        halt.as_ref().and_then(|halt| halt.reason.as_deref()).map(|reason| reason.to_datum()),
        halt.as_ref().map(|halt| halt.halted_by.as_str().to_datum()),
        halt.as_ref().map(|halt| Timestamp(halt.since).to_datum()),
        Some(fleet_halted.to_datum()),
        None,
        worker.then(|| "awa worker".to_datum()),
        Some(worker.to_datum()),
        observed.map(|observed| observed.to_datum()),
        is_recent.then(|| Timestamp(seen_at).to_datum()),
    ])?;
    Ok(Returned::Void)
}

/// Nothing is given back while pruning is halted: the client is told what that costs.
///
/// * `since` - when the worker began to obey, and what the segments took then
fn tell_growth((since, before): (i64, u64), now: i64) -> Result<()> {
    let bytes = segments::disk_bytes()?;
    let growth = per_minute(bytes.saturating_sub(before), now.saturating_sub(since));
    let [bytes, growth] = [bytes, growth].map(|bytes| bytes / 1024);
    log::notice(
        &format!("segments take {bytes} kB and grow by {growth} kB a minute"),
        "They give nothing back until awa.resume_runtime_scope() is called.",
    );
    Ok(())
}

/// * `micros` - how long it took; an instant counts as a second
fn per_minute(bytes: u64, micros: i64) -> u64 {
    let micros = u64::try_from(micros).unwrap_or(0).max(1_000_000);
    (u128::from(bytes) * 60_000_000 / u128::from(micros)) as u64
}
