//! rescue, recover.

use serde_json::Value;

use super::access;
use super::args::{options, required};
use crate::dispatch;
use crate::domain::rescue::{Kind, Limits};
use crate::error::{Error, Result};
use crate::maintenance::rescue;
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::ToDatum;
use crate::pg::xact;
use crate::store::acl::Profile;
use crate::store::recoveries;

sql_function!(awa_rescue, rescue);
sql_function!(awa_recover, recover);

/// One pass of each kind, in the caller's transaction.
///
/// Arguments: kind (owner, deadline, callback; NULL: all), max_rows (NULL: what
/// `awa.rescue_pass_max_rows` says; 0: one batch). Result: for each kind how many attempts were
/// rescued and why the pass ended: drained, budget or max_rows. Errors: 22023.
fn rescue(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.rescue()")?;
    access::check("", Profile::Operator)?;
    let kinds = match call.text(0) {
        None => Kind::ALL.to_vec(),
        Some(name) => vec![Kind::parse(&name).ok_or_else(|| {
            Error::invalid(format!("unknown kind of rescue \"{name}\""))
                .hint("The kinds are owner, deadline and callback.")
        })?],
    };
    let mut limits = rescue::limits();
    if let Some(max_rows) = call.i32(1) {
        limits.max_rows =
            u64::try_from(max_rows).map_err(|_| Error::invalid("max_rows must not be negative"))?;
    }
    let mut rows = call.rows()?;
    for kind in kinds {
        let db = dispatch::with_open(|_, db| db)?;
        let (rescued, end) = rescue::run_pass(db, kind, &limits)?;
        rows.push(&[
            Some(kind.name().to_datum()),
            Some((rescued as i64).to_datum()),
            Some(end.name().to_datum()),
        ])?;
    }
    Ok(Returned::Void)
}

/// Re-drives the attempts whose owners are gone, once for an epoch however many ask.
///
/// Arguments: epoch (not empty), opts (namespace: applications that share the database have
/// epochs of their own). Result: whether this call ran the pass, how many attempts it found with
/// a dead owner, and how many of them it re-drove. The epoch is this transaction's: who asks
/// while it is open is told that somebody else runs. Errors: 22023.
fn recover(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.recover()")?;
    access::check_any(&[Profile::Worker, Profile::Operator])?;
    let epoch = required(call.text(0).filter(|epoch| !epoch.is_empty()), "epoch")
        .map_err(|_| Error::invalid("epoch must not be null or empty"))?;
    let opts = options(call.jsonb_value(1).unwrap_or(Value::Null), "opts", &["namespace"])?;
    let namespace = match opts.get("namespace") {
        None | Some(Value::Null) => "",
        Some(Value::String(namespace)) => namespace,
        Some(_) => return Err(Error::invalid("namespace must be a string")),
    };
    let mut rows = call.rows()?;
    let ran = recoveries::begin(namespace, &epoch)?;
    let (mut orphaned, mut rescued) = (0, 0);
    if ran {
        let db = dispatch::with_open(|_, db| db)?;
        orphaned = dispatch::with(|d| d.count_orphans(db));
        // Who may not act on every queue leaves the rest to the worker, which is at it already.
        let may = access::may("", Profile::Worker)?;
        let limits = Limits { budget: i64::MAX, max_rows: u64::MAX, ..rescue::limits() };
        if may {
            rescued = rescue::run_pass(db, Kind::Owner, &limits)?.0;
        }
    }
    rows.push(&[
        Some(ran.to_datum()),
        Some((orphaned as i64).to_datum()),
        Some((rescued as i64).to_datum()),
    ])?;
    Ok(Returned::Void)
}
