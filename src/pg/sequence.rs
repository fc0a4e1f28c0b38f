//! Sequences without a privilege check.

use pgrx::pg_sys;

unsafe extern "C-unwind" {
    /// sequence.c; exported, but not in the bindings. May raise.
    fn nextval_internal(relid: pg_sys::Oid, check_permissions: bool) -> i64;
}

/// The next value of the sequence `oid`. Raises in a read-only transaction.
pub fn next_value(oid: u32) -> i64 {
    // SAFETY: raises for what is not a sequence; the closure owns nothing.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| nextval_internal(oid.into(), false)) }
}
