//! Roles.

use pgrx::pg_sys;

/// Whether `member` has the privileges of `role`, through memberships too.
pub fn has_privileges_of(member: u32, role: u32) -> bool {
    // SAFETY: looks in the system cache (acl.c).
    unsafe { pg_sys::has_privs_of_role(member.into(), role.into()) }
}
