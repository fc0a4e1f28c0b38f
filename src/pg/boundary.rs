//! Where Rust ends and the server's `longjmp` begins.
//!
//! pgrx turns an ERROR into a panic and a panic into an ERROR, but carries only the
//! SQLSTATEs it knows and no constraint name. Our codes are a contract, so both
//! directions are done here without loss:
//!
//! * An `Error` of ours, or a panic, is copied into palloc'd memory and raised from
//!   a frame that owns nothing, when every Rust frame is gone.
//! * An ERROR of the server is copied whole by an error context callback, which
//!   `errfinish` (elog.c) runs before it jumps, and thrown again as it was.

use core::cell::Cell;
use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pgrx::pg_sys;
use pgrx::pg_sys::panic::{CaughtError, ErrorReport, ErrorReportWithLevel};

use crate::error::{Error, Result, SqlState};

/// The plain symbols: these must jump, not panic.
mod raw {
    use super::*;

    unsafe extern "C-unwind" {
        pub fn errstart(elevel: c_int, domain: *const c_char) -> bool;
        pub fn errcode(sqlerrcode: c_int) -> c_int;
        pub fn errmsg_internal(fmt: *const c_char, ...) -> c_int;
        pub fn errdetail_internal(fmt: *const c_char, ...) -> c_int;
        pub fn errhint(fmt: *const c_char, ...) -> c_int;
        pub fn err_generic_string(field: c_int, value: *const c_char) -> c_int;
        pub fn errfinish(filename: *const c_char, lineno: c_int, funcname: *const c_char);
        pub fn ThrowErrorData(edata: *mut pg_sys::ErrorData);
        pub fn CopyErrorData() -> *mut pg_sys::ErrorData;
        pub fn FreeErrorData(edata: *mut pg_sys::ErrorData);
        pub fn MemoryContextAllocExtended(
            context: pg_sys::MemoryContext,
            size: usize,
            flags: c_int,
        ) -> *mut c_void;
    }
}

/// Runs `body` and hands its value to C, or raises its error.
///
/// # Safety
/// The caller must be a function that Postgres called, and neither it nor any frame
/// between it and here may own a value with a destructor: an error jumps over them.
pub unsafe fn run<T: Copy>(body: impl FnOnce() -> Result<T>) -> T {
    // SAFETY: read and written on the one thread a backend has.
    let context = unsafe { pg_sys::CurrentMemoryContext };
    let mut trap = Trap {
        link: pg_sys::ErrorContextCallback {
            // SAFETY: as above.
            previous: unsafe { pg_sys::error_context_stack },
            callback: Some(keep_error),
            arg: ptr::null_mut(),
        },
        context,
        kept: ptr::null_mut(),
    };
    let trap: *mut Trap = &mut trap;
    // SAFETY: `trap` outlives its place on the stack of callbacks: every way out of
    // `attempt` comes back here, and FATAL never comes back at all.
    unsafe {
        (*trap).link.arg = trap.cast();
        pg_sys::error_context_stack = &mut (*trap).link;
    }
    let outcome = attempt(trap, body);
    // SAFETY: takes off what was put on above; no Rust frame with a destructor is
    // left, as `body` and all it owned ended in `attempt`.
    unsafe {
        pg_sys::error_context_stack = (*trap).link.previous;
        match outcome {
            Outcome::Value(value) => value,
            Outcome::Raise(report) => {
                pg_sys::CurrentMemoryContext = context;
                report.raise()
            }
            Outcome::Rethrow(error) => {
                pg_sys::CurrentMemoryContext = context;
                raw::ThrowErrorData(error);
                // ThrowErrorData comes back only when the level is below ERROR, and
                // `keep_error` keeps no such thing.
                core::hint::unreachable_unchecked()
            }
        }
    }
}

/// For callbacks that must not fail: runs `body` and swallows whatever it throws.
/// Returns what it threw as text. The interrupt hold-off count, which the server
/// resets when it raises an ERROR (errfinish, elog.c), is put back, because the
/// caller (CommitTransaction, for one) is going to count it down; so is the memory
/// context.
pub fn swallow<T>(body: impl FnOnce() -> T) -> core::result::Result<T, String> {
    // SAFETY: backend-local.
    let (interrupts, cancels, context) = unsafe {
        (
            pg_sys::InterruptHoldoffCount,
            pg_sys::QueryCancelHoldoffCount,
            pg_sys::CurrentMemoryContext,
        )
    };
    catch_unwind(AssertUnwindSafe(body)).map_err(|payload| {
        // SAFETY: as above.
        unsafe {
            pg_sys::InterruptHoldoffCount = interrupts;
            pg_sys::QueryCancelHoldoffCount = cancels;
            pg_sys::CurrentMemoryContext = context;
        }
        Thrown::of(payload.as_ref()).error.message.into_owned()
    })
}

/// Runs `body`, and returns what it threw as an `Error`. The transaction is then in
/// the state the error left it in: the caller must abort it, or rethrow.
pub fn catch<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result,
        Err(payload) => Err(Thrown::of(payload.as_ref()).error),
    }
}

#[repr(C)]
struct Trap {
    link: pg_sys::ErrorContextCallback,
    context: pg_sys::MemoryContext,
    kept: *mut pg_sys::ErrorData,
}

enum Outcome<T> {
    Value(T),
    Raise(Report),
    Rethrow(*mut pg_sys::ErrorData),
}

#[inline(never)]
fn attempt<T>(trap: *mut Trap, body: impl FnOnce() -> Result<T>) -> Outcome<T> {
    let caught = catch_unwind(AssertUnwindSafe(body));
    // SAFETY: `run` keeps the trap alive for the whole call.
    let Trap { context, kept, .. } = unsafe { &*trap };
    match caught {
        Ok(Ok(value)) => Outcome::Value(value),
        Ok(Err(error)) => Outcome::Raise(Report::copy(&error, *context)),
        Err(payload) => {
            let thrown = Thrown::of(payload.as_ref());
            // The last ERROR of the server is the one being thrown, unless it was
            // caught on the way and something else was thrown after it.
            if thrown.from_server && is_same(*kept, &thrown.error.message) {
                Outcome::Rethrow(*kept)
            } else {
                Outcome::Raise(Report::copy(&thrown.error, *context))
            }
        }
    }
}

fn is_same(kept: *mut pg_sys::ErrorData, message: &str) -> bool {
    // SAFETY: null, or a copy that CopyErrorData made for us.
    unsafe {
        !kept.is_null()
            && if (*kept).message.is_null() {
                message == "<null error message>"
            } else {
                CStr::from_ptr((*kept).message).to_string_lossy() == message
            }
    }
}

/// Called by errfinish for whatever is reported below `run`, in ErrorContext.
unsafe extern "C-unwind" fn keep_error(arg: *mut c_void) {
    let trap: *mut Trap = arg.cast();
    // SAFETY: `arg` is the trap `run` put up. An out-of-memory error in here jumps
    // over this frame only, which owns nothing.
    unsafe {
        let previous = pg_sys::CurrentMemoryContext;
        pg_sys::CurrentMemoryContext = (*trap).context;
        let copy = raw::CopyErrorData();
        pg_sys::CurrentMemoryContext = previous;
        let stale = if (*copy).elevel == pgrx::PgLogLevel::ERROR as c_int {
            core::mem::replace(&mut (*trap).kept, copy)
        } else {
            copy
        };
        if !stale.is_null() {
            raw::FreeErrorData(stale);
        }
    }
}

/// What a panic carried.
struct Thrown {
    error: Error,
    /// Raised in C: `keep_error` has the whole of it.
    from_server: bool,
}

impl Thrown {
    fn of(payload: &(dyn Any + Send)) -> Self {
        if let Some(caught) = payload.downcast_ref::<CaughtError>() {
            return match caught {
                CaughtError::PostgresError(report) => {
                    Self { error: of_report(report), from_server: true }
                }
                CaughtError::ErrorReport(report)
                | CaughtError::RustPanic { ereport: report, .. } => {
                    Self { error: of_report(report), from_server: false }
                }
            };
        }
        let error = if let Some(report) = payload.downcast_ref::<ErrorReportWithLevel>() {
            of_report(report)
        } else if let Some(report) = payload.downcast_ref::<ErrorReport>() {
            Error::new(SqlState::INTERNAL, report.message().to_owned())
        } else if let Some(message) = payload.downcast_ref::<&str>() {
            of_panic(message)
        } else if let Some(message) = payload.downcast_ref::<String>() {
            of_panic(message)
        } else {
            of_panic("unexpected panic")
        };
        Self { error, from_server: false }
    }
}

fn of_report(report: &ErrorReportWithLevel) -> Error {
    let mut error =
        Error::new(unpack(report.sql_error_code() as c_int), report.message().to_owned());
    if let Some(detail) = report.detail() {
        error = error.detail(detail.to_owned());
    }
    if let Some(hint) = report.hint() {
        error = error.hint(hint.to_owned());
    }
    error
}

fn of_panic(message: &str) -> Error {
    let error = Error::internal(message.to_owned());
    match PANIC_PLACE.take() {
        Some(place) => error.detail(format!("The assertion at {place} failed.")),
        None => error,
    }
}

thread_local! {
    static PANIC_PLACE: Cell<Option<String>> = const { Cell::new(None) };
}

/// Remembers where a panic came from, beside what pgrx's hook does. To be called once,
/// when the library is loaded.
pub fn note_panics() {
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if !info.payload().is::<CaughtError>() {
            PANIC_PLACE.set(info.location().map(ToString::to_string));
        }
        previous(info);
    }));
}

/// MAKE_SQLSTATE (elog.h): six bits a character.
fn pack(code: SqlState) -> c_int {
    code.0
        .iter()
        .rev()
        .fold(0, |packed, byte| (packed << 6) | c_int::from(byte.wrapping_sub(b'0') & 0x3F))
}

fn unpack(packed: c_int) -> SqlState {
    SqlState(core::array::from_fn(|i| b'0' + ((packed >> (6 * i)) & 0x3F) as u8))
}

/// An `Error` as palloc'd C strings: nothing to drop.
#[derive(Clone, Copy)]
struct Report {
    code: c_int,
    message: *const c_char,
    detail: *const c_char,
    hint: *const c_char,
    constraint: *const c_char,
}

impl Report {
    fn copy(error: &Error, context: pg_sys::MemoryContext) -> Self {
        let copy = |text: Option<&str>| text.map_or(ptr::null(), |text| copy_text(text, context));
        Self {
            code: pack(error.code),
            message: copy(Some(&error.message)),
            detail: copy(error.detail.as_deref()),
            hint: copy(error.hint.as_deref()),
            constraint: copy(error.constraint),
        }
    }

    /// # Safety
    /// As for `run`: no frame up to the caller in C may own anything.
    unsafe fn raise(self) -> ! {
        // SAFETY: the strings are NUL-terminated and live in a context of the caller.
        // errstart never refuses an ERROR, so errfinish jumps.
        unsafe {
            raw::errstart(pgrx::PgLogLevel::ERROR as c_int, ptr::null());
            raw::errcode(self.code);
            let verbatim = c"%s".as_ptr();
            raw::errmsg_internal(verbatim, self.message);
            if !self.detail.is_null() {
                raw::errdetail_internal(verbatim, self.detail);
            }
            if !self.hint.is_null() {
                raw::errhint(verbatim, self.hint);
            }
            if !self.constraint.is_null() {
                raw::err_generic_string(
                    c_int::from(pg_sys::PG_DIAG_CONSTRAINT_NAME),
                    self.constraint,
                );
            }
            raw::errfinish(c"awa".as_ptr(), 0, ptr::null());
            core::hint::unreachable_unchecked()
        }
    }
}

/// Copies for C, in the server's encoding where that is UTF-8; elsewhere what is not
/// ASCII becomes a question mark, since a conversion could fail. Cannot fail itself.
fn copy_text(text: &str, context: pg_sys::MemoryContext) -> *const c_char {
    const LONGEST: usize = 1 << 20;
    let mut end = text.len().min(LONGEST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let is_utf8 = super::datum::database_is_utf8();
    // SAFETY: the size is far below the limit at which NO_OOM would still raise;
    // `end + 1` bytes are written to as many allocated.
    unsafe {
        let copy: *mut u8 =
            raw::MemoryContextAllocExtended(context, end + 1, pg_sys::MCXT_ALLOC_NO_OOM as c_int)
                .cast();
        if copy.is_null() {
            return c"out of memory".as_ptr();
        }
        for (i, &byte) in text.as_bytes().iter().take(end).enumerate() {
            let keep = byte != 0 && (is_utf8 || byte.is_ascii());
            *copy.add(i) = if keep { byte } else { b'?' };
        }
        *copy.add(end) = 0;
        copy.cast()
    }
}
