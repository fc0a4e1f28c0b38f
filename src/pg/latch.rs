//! Waiting for and waking processes.

use core::ffi::{c_int, c_long};
use core::ptr;

use pgrx::{check_for_interrupts, pg_sys};

use super::compat;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wake {
    Latch,
    Timeout,
}

unsafe extern "C-unwind" {
    /// pqcomm.c; exported, but not in the bindings. May raise.
    fn pq_check_connection() -> bool;
}

/// Sleeps until the latch is set or `timeout_ms` have passed, then serves interrupts:
/// cancel, terminate and statement_timeout raise from here. The latch is reset before
/// that, so the caller looks at its condition afterwards and loses no wake-up.
pub fn wait(timeout_ms: u64) -> Wake {
    let events = pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH;
    let timeout = c_long::try_from(timeout_ms.min(i32::MAX as u64)).unwrap_or(c_long::MAX);
    // SAFETY: our own latch. A catalog snapshot that nothing else needs would hold the horizon
    // back for as long as we sleep; PostgresMain drops it before it waits, too.
    let woken = unsafe {
        pg_sys::InvalidateCatalogSnapshotConditionally();
        let woken =
            pg_sys::WaitLatch(pg_sys::MyLatch, events as c_int, timeout, compat::wait_event());
        pg_sys::ResetLatch(pg_sys::MyLatch);
        woken
    };
    check_for_interrupts!();
    if woken as u32 & pg_sys::WL_LATCH_SET != 0 { Wake::Latch } else { Wake::Timeout }
}

/// Our place in the array of processes: who wants to wake us is told this number. It
/// is stable for the process's life and reused by another one later.
pub fn my_proc_number() -> u32 {
    compat::my_proc_number()
}

/// More than any proc number of a process that can wait, as the settings say: known before
/// the server has sized its array of processes (InitializeMaxBackends, postinit.c).
pub fn max_procs() -> usize {
    compat::max_backends() + 64
}

pub fn my_pid() -> i32 {
    // SAFETY: backend-local.
    unsafe { pg_sys::MyProcPid }
}

/// Sets the latch of the process that has `number` now; a spurious wake-up if that is
/// no longer the one that was meant. May be called from a callback.
pub fn set_latch_of(number: u32) {
    // SAFETY: within the array, whose latches are shared memory; SetLatch raises
    // nothing (latch.c).
    unsafe {
        let procs = pg_sys::ProcGlobal;
        if number < (*procs).allProcCount {
            let process = (*procs).allProcs.add(number as usize);
            pg_sys::SetLatch(ptr::addr_of_mut!((*process).procLatch));
        }
    }
}

/// Whether our client has closed its socket. It may consume a set latch: call it
/// before looking at the condition that is being waited for, not after.
pub fn client_is_gone() -> bool {
    // SAFETY: a process with a port has the wait set that pq_check_connection uses.
    unsafe {
        !pg_sys::MyProcPort.is_null()
            && pg_sys::WaitEventSetCanReportClosed()
            && !pg_sys::ffi::pg_guard_ffi_boundary(|| pq_check_connection())
    }
}

/// CHECK_FOR_INTERRUPTS: to be called in loops that wait for nothing.
pub fn serve_interrupts() {
    check_for_interrupts!();
}
