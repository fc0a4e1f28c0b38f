//! Procedures that let go of their snapshot while they wait.

use pgrx::pg_sys;

use super::call::{Call, Returned};
use super::datum::Datum;
use crate::error::{Error, Result};

/// Whether the procedure was called where it must not commit: inside a transaction block, a
/// function, or another atomic context (ExecuteCallStmt, functioncmds.c).
pub fn is_atomic(call: &Call) -> bool {
    // SAFETY: a procedure's call has a CallContext node, or none when called otherwise.
    unsafe {
        let context = (*call.info()).context;
        context.is_null()
            || (*context).type_ != pg_sys::NodeTag::T_CallContext
            || (*context.cast::<pg_sys::CallContext>()).atomic
    }
}

/// Runs `body` without a snapshot, in a transaction of its own where that is possible: it
/// holds no horizon back while it waits.
pub fn without_snapshot<T>(atomic: bool, body: impl FnOnce() -> Result<T>) -> Result<T> {
    if atomic {
        return body();
    }
    // SAFETY: a non-atomic connection may commit; the snapshot of the portal is dropped by
    // that, and made again before anything needs one (EnsurePortalSnapshotExists).
    unsafe {
        if pg_sys::SPI_connect_ext(pg_sys::SPI_OPT_NONATOMIC as i32)
            != pg_sys::SPI_OK_CONNECT as i32
        {
            return Err(Error::internal("SPI failed to connect"));
        }
        pg_sys::SPI_commit();
        let result = body();
        pg_sys::EnsurePortalSnapshotExists();
        pg_sys::SPI_finish();
        result
    }
}

/// The values of the OUT and INOUT arguments, as the row that a procedure returns.
pub fn returned(call: &Call, values: &[Option<Datum>]) -> Result<Returned> {
    // SAFETY: as many values as the procedure has such arguments.
    unsafe {
        let mut descriptor = core::ptr::null_mut();
        let class =
            pg_sys::get_call_result_type(call.info(), core::ptr::null_mut(), &mut descriptor);
        if class != pg_sys::TypeFuncClass::TYPEFUNC_COMPOSITE
            || (*descriptor).natts as usize != values.len()
        {
            return Err(Error::internal("procedure returns another row"));
        }
        let mut datums: Vec<Datum> = values.iter().map(|v| v.unwrap_or(Datum::null())).collect();
        let mut nulls: Vec<bool> = values.iter().map(Option::is_none).collect();
        let descriptor = pg_sys::BlessTupleDesc(descriptor);
        let tuple = pg_sys::heap_form_tuple(descriptor, datums.as_mut_ptr(), nulls.as_mut_ptr());
        Ok(Returned::Value(pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data)))
    }
}
