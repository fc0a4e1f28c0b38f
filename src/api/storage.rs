//! What clients of awa 0.6 ask about their storage and its caches: there is nothing to do.

use crate::error::Result;
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{Datum, Json, Timestamp, ToDatum};
use crate::pg::xact;

sql_function!(awa_storage_status, status);
sql_function!(awa_admin_dirty_queue_marks, nothing);

/// One row: the storage that keeps jobs in queues is in use, and none is being prepared.
fn status(call: &mut Call) -> Result<Returned> {
    let mut rows = call.rows()?;
    let engine = "queue_storage";
    let now = Timestamp(xact::micros()).to_datum();
    rows.push(&[
        Some(engine.to_datum()),
        Some(engine.to_datum()),
        None,
        Some("active".to_datum()),
        Some(0_i64.to_datum()),
        Some(Json("{}").to_datum()),
        Some(now),
        Some(now),
        Some(now),
    ])?;
    Ok(Returned::Void)
}

/// Of a trigger no row, of a function void or zero: the same datum.
fn nothing(_call: &mut Call) -> Result<Returned> {
    Ok(Returned::Value(Datum::null()))
}
