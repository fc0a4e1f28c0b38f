//! Relation locks.

use pgrx::pg_sys;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(i32)]
pub enum LockMode {
    AccessShare = 1,
    RowShare,
    RowExclusive,
    ShareUpdateExclusive,
    Share,
    ShareRowExclusive,
    Exclusive,
    AccessExclusive,
}

/// Takes a relation's lock if that needs no wait; it is then held to the end of the
/// transaction, or until `unlock`. The relation may be gone all the same.
pub fn lock_conditional(oid: u32, mode: LockMode) -> bool {
    // SAFETY: any oid can be locked.
    unsafe { pg_sys::ConditionalLockRelationOid(oid.into(), mode as i32) }
}

/// Waits for a relation's lock.
pub fn lock(oid: u32, mode: LockMode) {
    // SAFETY: as above.
    unsafe { pg_sys::LockRelationOid(oid.into(), mode as i32) }
}

/// Gives back one hold of a relation's lock.
pub fn unlock(oid: u32, mode: LockMode) {
    // SAFETY: warns where the lock is not held.
    unsafe { pg_sys::UnlockRelationOid(oid.into(), mode as i32) }
}
