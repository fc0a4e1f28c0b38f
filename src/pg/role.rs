//! Roles.

use core::ffi::CStr;
use std::ffi::CString;

use pgrx::pg_sys;

use super::datum;

/// Whether `member` has the privileges of `role`, through memberships too.
pub fn has_privileges_of(member: u32, role: u32) -> bool {
    // SAFETY: looks in the system cache (acl.c).
    unsafe { pg_sys::has_privs_of_role(member.into(), role.into()) }
}

/// The role's oid; None: there is none of that name.
pub fn find(name: &str) -> Option<u32> {
    let name = CString::new(datum::to_server(name)).ok()?;
    // SAFETY: looks in the system cache (acl.c).
    let oid: u32 = unsafe { pg_sys::get_role_oid(name.as_ptr(), true) }.into();
    (oid != 0).then_some(oid)
}

/// The role's name as an identifier of SQL.
pub fn quoted(role: u32) -> Option<String> {
    // SAFETY: both give palloc'd texts, or the one they got (acl.c, ruleutils.c).
    unsafe {
        let name = pg_sys::GetUserNameFromId(role.into(), true);
        if name.is_null() {
            return None;
        }
        Some(datum::from_server(CStr::from_ptr(pg_sys::quote_identifier(name)).to_bytes()).into())
    }
}
