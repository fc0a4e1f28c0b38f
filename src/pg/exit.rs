//! The end of a backend.

use core::cell::Cell;
use core::ffi::c_int;

use pgrx::pg_sys;

use super::boundary;
use super::datum::Datum;

thread_local! {
    static HANDLER: Cell<Option<fn()>> = const { Cell::new(None) };
}

/// Calls `handler` when this process ends, however it does: after the abort of its last
/// transaction (ShutdownPostgres is a before_shmem_exit callback), and before it gives up
/// its place among the processes (ProcKill was registered earlier, and callbacks run in
/// reverse order; ipc.c). It does arithmetic only.
pub fn on_exit(handler: fn()) {
    if HANDLER.replace(Some(handler)).is_none() {
        // SAFETY: the callback keeps every panic to itself.
        unsafe { pg_sys::on_shmem_exit(Some(run), Datum::null()) };
    }
}

unsafe extern "C-unwind" fn run(_code: c_int, _arg: Datum) {
    if let Ok(Some(handler)) = HANDLER.try_with(Cell::get) {
        // A panic here has nowhere to go; the dispatcher's lock guard has told.
        let _ = boundary::swallow(handler);
    }
}
