//! One block of shared memory and one tranche of lightweight locks, sized by
//! settings at server start.

use core::ffi::{CStr, c_int};
use core::ptr::{self, NonNull};
use core::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use pgrx::pg_sys;
use pgrx::prelude::*;

use crate::error::{Error, SqlState};

const NAME: &CStr = c"awa";

static SIZE: AtomicUsize = AtomicUsize::new(0);
static LOCKS: AtomicUsize = AtomicUsize::new(0);
static INIT: AtomicPtr<()> = AtomicPtr::new(ptr::null_mut());
static BASE: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static TRANCHE: AtomicPtr<pg_sys::LWLockPadded> = AtomicPtr::new(ptr::null_mut());

static mut PREVIOUS_REQUEST: pg_sys::shmem_request_hook_type = None;
static mut PREVIOUS_STARTUP: pg_sys::shmem_startup_hook_type = None;

/// Whether the library is being loaded by `shared_preload_libraries`, the only time
/// at which shared memory can be asked for.
pub fn is_preloading() -> bool {
    // SAFETY: a plain flag of the postmaster.
    unsafe { pg_sys::process_shared_preload_libraries_in_progress }
}

/// Asks for `size` bytes and `locks` locks. To be called from `_PG_init`, once, while
/// preloading.
pub fn request(size: usize, locks: usize) {
    SIZE.store(size, Ordering::Relaxed);
    LOCKS.store(locks, Ordering::Relaxed);
    // SAFETY: hooks are chained once, in the postmaster, before anything runs.
    unsafe {
        PREVIOUS_REQUEST = pg_sys::shmem_request_hook;
        pg_sys::shmem_request_hook = Some(on_request);
        PREVIOUS_STARTUP = pg_sys::shmem_startup_hook;
        pg_sys::shmem_startup_hook = Some(on_startup);
    }
}

/// Registers what lays out the block. It is called with the block zeroed, once for
/// each life of the shared memory: at start and again after a crash of a backend.
pub fn attach(init: unsafe fn(*mut u8, usize)) {
    INIT.store(init as *mut (), Ordering::Relaxed);
}

/// The block, in every process once the server has started.
pub fn base() -> Option<NonNull<u8>> {
    NonNull::new(BASE.load(Ordering::Relaxed))
}

pub fn size() -> usize {
    SIZE.load(Ordering::Relaxed)
}

/// False where the library was not preloaded.
pub fn is_ready() -> bool {
    base().is_some()
}

/// 55000 unless shared memory is there.
pub fn ensure_ready() -> crate::error::Result<()> {
    if is_ready() {
        return Ok(());
    }
    Err(Error::new(SqlState::WRONG_STATE, "awa is not loaded by the server")
        .detail("The queue lives in shared memory, which is set up when the server starts.")
        .hint("Add awa to shared_preload_libraries and restart the server."))
}

/// Lock number `n` of the tranche; None out of range or before start.
pub(super) fn lock(n: usize) -> Option<*mut pg_sys::LWLock> {
    let tranche = TRANCHE.load(Ordering::Relaxed);
    if tranche.is_null() || n >= LOCKS.load(Ordering::Relaxed) {
        return None;
    }
    // SAFETY: in range of the tranche, whose address is fixed for the server's life.
    Some(unsafe { ptr::addr_of_mut!((*tranche.add(n)).lock) })
}

#[pg_guard]
extern "C-unwind" fn on_request() {
    // SAFETY: called by the postmaster in process_shmem_requests, where both
    // requests are allowed (ipci.c).
    unsafe {
        if let Some(previous) = PREVIOUS_REQUEST {
            pg_sys::ffi::pg_guard_ffi_boundary(|| previous());
        }
        pg_sys::RequestAddinShmemSpace(SIZE.load(Ordering::Relaxed));
        #[cfg(feature = "debug_points")]
        super::debug_point::request();
        pg_sys::RequestNamedLWLockTranche(NAME.as_ptr(), LOCKS.load(Ordering::Relaxed) as c_int);
    }
}

#[pg_guard]
extern "C-unwind" fn on_startup() {
    // SAFETY: called once shared memory exists; AddinShmemInitLock makes the first
    // one in lay the block out (in EXEC_BACKEND builds every process comes by).
    unsafe {
        if let Some(previous) = PREVIOUS_STARTUP {
            pg_sys::ffi::pg_guard_ffi_boundary(|| previous());
        }
        let size = SIZE.load(Ordering::Relaxed);
        let lock = super::compat::addin_shmem_init_lock();
        pg_sys::LWLockAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let mut found = false;
        let block: *mut u8 = pg_sys::ShmemInitStruct(NAME.as_ptr(), size, &mut found).cast();
        TRANCHE.store(pg_sys::GetNamedLWLockTranche(NAME.as_ptr()), Ordering::Relaxed);
        if !found {
            ptr::write_bytes(block, 0, size);
            let init = INIT.load(Ordering::Relaxed);
            if !init.is_null() {
                let init: unsafe fn(*mut u8, usize) = core::mem::transmute(init);
                init(block, size);
            }
        }
        BASE.store(block, Ordering::Relaxed);
        #[cfg(feature = "debug_points")]
        super::debug_point::attach();
        pg_sys::LWLockRelease(lock);
    }
}
