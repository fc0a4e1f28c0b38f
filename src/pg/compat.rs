//! What differs between the majors, and the only place that knows.

use core::ffi::{CStr, c_int};

use pgrx::pg_sys;

/// AddinShmemInitLock: number 21 of the individual locks in every major we support
/// (lwlocknames.txt, lwlocklist.h from 17).
pub fn addin_shmem_init_lock() -> *mut pg_sys::LWLock {
    const ADDIN_SHMEM_INIT_LOCK: usize = 21;
    // SAFETY: the main array is set up before any library is loaded.
    unsafe { core::ptr::addr_of_mut!((*pg_sys::MainLWLockArray.add(ADDIN_SHMEM_INIT_LOCK)).lock) }
}

/// Settings of the worker that not every major knows (see `worker::connect`).
#[cfg(any(feature = "pg15", feature = "pg16"))]
pub const PINS: &[(&CStr, &CStr)] = &[];
#[cfg(any(feature = "pg17", feature = "pg18"))]
pub const PINS: &[(&CStr, &CStr)] = &[(c"transaction_timeout", c"0")];

type SignalHandler = unsafe extern "C-unwind" fn(c_int);

/// # Safety
/// `handler` does only what a signal handler may.
pub unsafe fn on_signal(signal: c_int, handler: SignalHandler) {
    // SAFETY: the caller vouches for the handler.
    #[cfg(not(feature = "pg18"))]
    unsafe {
        pg_sys::pqsignal(signal, Some(handler))
    };
    // SAFETY: as above; pqsignal became a macro.
    #[cfg(feature = "pg18")]
    unsafe {
        pg_sys::pqsignal_be(signal, Some(handler))
    };
}

/// This process's place in the array of processes.
pub fn this_process_number() -> i32 {
    // SAFETY: MyProc is set before any code of ours runs in a process that has one.
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    unsafe {
        (*pg_sys::MyProc).pgprocno
    }
    // SAFETY: a plain variable.
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    unsafe {
        pg_sys::MyProcNumber
    }
}

pub fn owns_database(database: pg_sys::Oid) -> bool {
    // SAFETY: a look-up in the catalog cache.
    #[cfg(feature = "pg15")]
    unsafe {
        pg_sys::pg_database_ownercheck(database, pg_sys::GetUserId())
    }
    // SAFETY: as above.
    #[cfg(not(feature = "pg15"))]
    unsafe {
        pg_sys::object_ownercheck(pg_sys::DatabaseRelationId, database, pg_sys::GetUserId())
    }
}

pub fn owns_extension(extension: pg_sys::Oid) -> bool {
    // SAFETY: a look-up in the catalog.
    #[cfg(feature = "pg15")]
    unsafe {
        pg_sys::pg_extension_ownercheck(extension, pg_sys::GetUserId())
    }
    // SAFETY: as above.
    #[cfg(not(feature = "pg15"))]
    unsafe {
        pg_sys::object_ownercheck(pg_sys::ExtensionRelationId, extension, pg_sys::GetUserId())
    }
}
