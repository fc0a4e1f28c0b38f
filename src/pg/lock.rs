//! Locks of relations, and short ones on keys.

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

/// Whether the lock could be had without waiting, at this moment. Looking is cheaper than
/// taking: an AccessExclusiveLock is written to WAL (LogAccessExclusiveLock, standby.c).
pub fn is_free(oid: u32, mode: LockMode) -> bool {
    // SAFETY: a lock tag of a relation of this database (SetLocktagRelationOid, lmgr.c); the
    // result is palloc'd and ends with an invalid entry.
    unsafe {
        let tag = pg_sys::LOCKTAG {
            locktag_field1: pg_sys::MyDatabaseId.into(),
            locktag_field2: oid,
            locktag_field3: 0,
            locktag_field4: 0,
            locktag_type: pg_sys::LockTagType::LOCKTAG_RELATION as u8,
            locktag_lockmethodid: pg_sys::DEFAULT_LOCKMETHOD as u8,
        };
        let mut count = 0;
        let holders = pg_sys::GetLockConflicts(&tag, mode as i32, &mut count);
        pg_sys::pfree(holders.cast());
        count == 0
    }
}

pub fn lock(oid: u32, mode: LockMode) {
    // SAFETY: as above.
    unsafe { pg_sys::LockRelationOid(oid.into(), mode as i32) }
}

/// Gives back one hold of a relation's lock.
pub fn unlock(oid: u32, mode: LockMode) {
    // SAFETY: warns where the lock is not held.
    unsafe { pg_sys::UnlockRelationOid(oid.into(), mode as i32) }
}

/// Among advisory locks, but of a class that no SQL function takes (lockfuncs.c has 1 and 2).
const KEY_CLASS: u16 = 0x6177;
const EPOCH_CLASS: u16 = 0x6178;

/// One key of this database, held by one backend at a time; given back when dropped.
pub struct KeyLock {
    tag: pg_sys::LOCKTAG,
}

fn key_tag(space: u32, hash: u32) -> pg_sys::LOCKTAG {
    // SAFETY: backend-local.
    let database: u32 = unsafe { pg_sys::MyDatabaseId }.into();
    pg_sys::LOCKTAG {
        locktag_field1: database,
        locktag_field2: space,
        locktag_field3: hash,
        locktag_field4: KEY_CLASS,
        locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
        locktag_lockmethodid: pg_sys::USER_LOCKMETHOD as u8,
    }
}

/// Waits for the lock on a key. For a few instructions: whoever holds it must wait for
/// nobody.
pub fn lock_key(space: u32, hash: u32) -> KeyLock {
    let tag = key_tag(space, hash);
    // SAFETY: a well-formed tag; an ERROR gives the lock back with its transaction.
    unsafe { pg_sys::LockAcquire(&tag, LockMode::Exclusive as i32, false, false) };
    KeyLock { tag }
}

/// Waits for the lock on a key, and holds it to the end of the transaction.
pub fn hold_key(space: u32, hash: u32) {
    let tag = key_tag(space, hash);
    // SAFETY: a well-formed tag.
    unsafe { pg_sys::LockAcquire(&tag, LockMode::Exclusive as i32, false, false) };
}

/// Takes the lock on a key to the end of the transaction if that needs no wait.
pub fn try_hold_key(space: u32, hash: u32) -> bool {
    let tag = key_tag(space, hash);
    // SAFETY: a well-formed tag.
    let taken = unsafe { pg_sys::LockAcquire(&tag, LockMode::Exclusive as i32, false, true) };
    taken != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
}

/// Whether nobody else holds the lock on a key.
pub fn is_key_free(space: u32, hash: u32) -> bool {
    let tag = key_tag(space, hash);
    // SAFETY: a well-formed tag; what was taken is given back.
    unsafe {
        let mode = LockMode::Exclusive as i32;
        let taken = pg_sys::LockAcquire(&tag, mode, false, true);
        let is_free = taken != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL;
        if is_free {
            pg_sys::LockRelease(&tag, mode, false);
        }
        is_free
    }
}

/// As `try_hold_key`, on one of the epochs of `awa.recover`.
pub fn try_hold_epoch(hash: u64) -> bool {
    let tag = pg_sys::LOCKTAG {
        locktag_field4: EPOCH_CLASS,
        ..key_tag((hash >> 32) as u32, hash as u32)
    };
    // SAFETY: a well-formed tag.
    let taken = unsafe { pg_sys::LockAcquire(&tag, LockMode::Exclusive as i32, false, true) };
    taken != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
}

impl Drop for KeyLock {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: held.
            unsafe { pg_sys::LockRelease(&self.tag, LockMode::Exclusive as i32, false) };
        }
    }
}
