//! What differs between the majors, and the only place that knows.

use pgrx::pg_sys;

/// AddinShmemInitLock: number 21 of the individual locks in every major we support
/// (lwlocknames.txt, lwlocklist.h from 17).
pub fn addin_shmem_init_lock() -> *mut pg_sys::LWLock {
    const ADDIN_SHMEM_INIT_LOCK: usize = 21;
    // SAFETY: the main array is set up before any library is loaded.
    unsafe { core::ptr::addr_of_mut!((*pg_sys::MainLWLockArray.add(ADDIN_SHMEM_INIT_LOCK)).lock) }
}
