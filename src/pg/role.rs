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

/// Whether the current user may truncate a table.
pub fn may_truncate(table: u32) -> bool {
    let privilege = pg_sys::AclMode::from(pg_sys::ACL_TRUNCATE);
    // SAFETY: looks in the system cache (aclchk.c).
    let result = unsafe { pg_sys::pg_class_aclcheck(table.into(), pg_sys::GetUserId(), privilege) };
    result == pg_sys::AclResult::ACLCHECK_OK
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
