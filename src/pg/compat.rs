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

/// Whether column `i` (from 0) is declared NOT NULL.
///
/// # Safety
/// `descriptor` is live and has more than `i` columns.
pub unsafe fn is_not_null(descriptor: pg_sys::TupleDesc, i: usize) -> bool {
    // SAFETY: the caller vouches for the bounds.
    unsafe {
        #[cfg(not(feature = "pg18"))]
        return (*(*descriptor).attrs.as_ptr().add(i)).attnotnull;
        // The full descriptions follow the compact ones (tupdesc.h, TupleDescAttr).
        #[cfg(feature = "pg18")]
        {
            let columns = usize::try_from((*descriptor).natts).unwrap_or(0);
            let full = (*descriptor).compact_attrs.as_ptr().add(columns);
            (*full.cast::<pg_sys::FormData_pg_attribute>().add(i)).attnotnull
        }
    }
}

/// # Safety
/// As for index_beginscan.
pub unsafe fn index_beginscan(
    heap: pg_sys::Relation,
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    keys: i32,
) -> pg_sys::IndexScanDesc {
    // SAFETY: the caller vouches.
    unsafe {
        #[cfg(not(feature = "pg18"))]
        return pg_sys::index_beginscan(heap, index, snapshot, keys, 0);
        #[cfg(feature = "pg18")]
        pg_sys::index_beginscan(heap, index, snapshot, core::ptr::null_mut(), keys, 0)
    }
}

/// # Safety
/// As for index_beginscan_bitmap.
pub unsafe fn index_beginscan_bitmap(
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    keys: i32,
) -> pg_sys::IndexScanDesc {
    // SAFETY: the caller vouches.
    unsafe {
        #[cfg(not(feature = "pg18"))]
        return pg_sys::index_beginscan_bitmap(index, snapshot, keys);
        #[cfg(feature = "pg18")]
        pg_sys::index_beginscan_bitmap(index, snapshot, core::ptr::null_mut(), keys)
    }
}

/// The blocks of a bitmap, in order, and their line pointers: all that a page can have where
/// the bitmap has forgotten which.
///
/// # Safety
/// A bitmap of this backend that nobody iterates over.
pub unsafe fn bitmap_pages(bitmap: *mut pg_sys::TIDBitmap) -> Vec<(u32, Vec<u16>)> {
    /// MaxHeapTuplesPerPage (htup_details.h) for pages of 8 kB; the heap passes over those that
    /// are not there.
    const MOST: u16 = 291;
    let mut pages = Vec::new();
    // SAFETY: the caller vouches; the iterator ends before the bitmap.
    #[cfg(not(feature = "pg18"))]
    unsafe {
        let iterator = pg_sys::tbm_begin_iterate(bitmap);
        loop {
            let page = pg_sys::tbm_iterate(iterator);
            if page.is_null() {
                break;
            }
            let offsets = match usize::try_from((*page).ntuples) {
                Ok(count) => (*page).offsets.as_slice(count).to_vec(),
                Err(_) => (1..=MOST).collect(),
            };
            pages.push(((*page).blockno, offsets));
        }
        pg_sys::tbm_end_iterate(iterator);
    }
    // SAFETY: as above; the offsets have room for a page's.
    #[cfg(feature = "pg18")]
    unsafe {
        let iterator = pg_sys::tbm_begin_private_iterate(bitmap);
        let mut page = pg_sys::TBMIterateResult::default();
        while pg_sys::tbm_private_iterate(iterator, &mut page) {
            let mut offsets: Vec<u16> = (1..=MOST).collect();
            if !page.lossy {
                let room = u32::from(MOST);
                let count = pg_sys::tbm_extract_page_tuple(&mut page, offsets.as_mut_ptr(), room);
                offsets.truncate(usize::try_from(count).unwrap_or(0));
            }
            pages.push((page.blockno, offsets));
        }
        pg_sys::tbm_end_private_iterate(iterator);
    }
    pages
}

/// Ends a series of index_insert calls with one IndexInfo; needed from 17.
///
/// # Safety
/// As for index_insert_cleanup.
pub unsafe fn index_insert_cleanup(index: pg_sys::Relation, info: *mut pg_sys::IndexInfo) {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    let _ = (index, info);
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    // SAFETY: the caller vouches.
    unsafe {
        pg_sys::index_insert_cleanup(index, info)
    }
}

/// # Safety
/// As for ExecuteTruncateGuts: `relations` are open, and locked exclusively.
pub unsafe fn truncate(relations: *mut pg_sys::List, oids: *mut pg_sys::List) {
    let none = core::ptr::null_mut();
    let restrict = pg_sys::DropBehavior::DROP_RESTRICT;
    // SAFETY: the caller vouches.
    unsafe {
        #[cfg(feature = "pg15")]
        pg_sys::ExecuteTruncateGuts(relations, oids, none, restrict, false);
        #[cfg(not(feature = "pg15"))]
        pg_sys::ExecuteTruncateGuts(relations, oids, none, restrict, false, false);
    }
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

/// Our place in ProcGlobal->allProcs.
pub fn my_proc_number() -> u32 {
    // SAFETY: set when the process got its PGPROC.
    unsafe {
        #[cfg(any(feature = "pg15", feature = "pg16"))]
        let number = (*pg_sys::MyProc).pgprocno;
        #[cfg(not(any(feature = "pg15", feature = "pg16")))]
        let number = pg_sys::MyProcNumber;
        u32::try_from(number).unwrap_or(u32::MAX)
    }
}

/// What pg_stat_activity shows while we wait: a name of our own from 17.
pub fn wait_event() -> u32 {
    #[cfg(any(feature = "pg15", feature = "pg16"))]
    return pg_sys::PG_WAIT_EXTENSION;
    #[cfg(not(any(feature = "pg15", feature = "pg16")))]
    {
        use core::cell::Cell;
        thread_local! { static EVENT: Cell<u32> = const { Cell::new(0) } }
        if EVENT.get() == 0 {
            // SAFETY: takes a lock and a place in a shared table, once a backend.
            EVENT.set(unsafe { pg_sys::WaitEventExtensionNew(c"AwaWait".as_ptr()) });
        }
        EVENT.get()
    }
}

#[cfg(not(feature = "pg18"))]
unsafe extern "C" {
    /// autovacuum.c; not in the bindings.
    static autovacuum_max_workers: c_int;
}

/// MaxBackends, from the settings it is made of.
pub fn max_backends() -> usize {
    // SAFETY: plain variables behind settings that only a start changes.
    let sum = unsafe {
        #[cfg(not(feature = "pg18"))]
        let autovacuum = autovacuum_max_workers;
        #[cfg(feature = "pg18")]
        let autovacuum = pg_sys::autovacuum_worker_slots;
        pg_sys::MaxConnections
            + autovacuum
            + pg_sys::max_worker_processes
            + pg_sys::max_wal_senders
            + 2
    };
    usize::try_from(sum).unwrap_or(0)
}
