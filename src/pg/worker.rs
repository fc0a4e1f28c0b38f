//! Background workers: what a process without a client needs from the server.
//!
//! The framework's own wrapper is not used for what it lacks: `die` as the handler
//! of SIGTERM (so that a long statement, and a wait for a lock while connecting, can
//! be ended), reloads that arrive, and transactions that survive an error.

use core::ffi::{CStr, c_int, c_long};
use core::time::Duration;

use pgrx::bgworkers::{BackgroundWorkerBuilder, BgWorkerStartTime};
use pgrx::pg_sys;
use pgrx::prelude::*;

use super::{boundary, compat, latch};
use crate::error::{Error, Result};
use crate::supervisor::registry::Process;

const LIBRARY: &str = "awa";
const SIGHUP: c_int = 1;
const SIGINT: c_int = 2;
const SIGTERM: c_int = 15;

/// The longest that one wait lasts; a caller that has nothing to do waits again.
const LONGEST_WAIT: Duration = Duration::from_secs(3_600);

mod raw {
    use core::ffi::c_int;

    // Handlers are passed by address, so these must be the C symbols themselves.
    unsafe extern "C-unwind" {
        pub fn die(signal: c_int);
        pub fn StatementCancelHandler(signal: c_int);
        pub fn SignalHandlerForConfigReload(signal: c_int);
    }

    unsafe extern "C" {
        pub fn kill(pid: c_int, signal: c_int) -> c_int;
    }
}

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn awa_launcher_main(_arg: pg_sys::Datum) {
    crate::supervisor::launcher::run();
}

#[pg_guard]
#[unsafe(no_mangle)]
pub extern "C-unwind" fn awa_worker_main(arg: pg_sys::Datum) {
    // The database's OID below, the generation above.
    let arg = arg.value() as u64;
    crate::supervisor::worker::run(arg as u32, (arg >> 32) as u32);
}

/// For `_PG_init`. The launcher never runs on a standby: it starts when recovery has
/// ended, be it at start or by promotion.
pub fn register_launcher() {
    BackgroundWorkerBuilder::new("awa launcher")
        .set_type("awa launcher")
        .set_library(LIBRARY)
        .set_function("awa_launcher_main")
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(Some(Duration::from_secs(1)))
        .load();
}

/// Asks the postmaster for a worker; it tells this process when it starts and ends.
/// None: max_worker_processes are in use.
pub fn start(database: u32, name: &str, generation: u32) -> Option<Started> {
    let arg = u64::from(database) | (u64::from(generation) << 32);
    let builder = BackgroundWorkerBuilder::new(&format!("awa worker {name}"))
        .set_type("awa worker")
        .set_library(LIBRARY)
        .set_function("awa_worker_main")
        .set_argument(Some(pg_sys::Datum::from(arg as usize)))
        .enable_spi_access()
        .set_start_time(BgWorkerStartTime::RecoveryFinished)
        .set_restart_time(None)
        .set_notify_pid(this_process().pid);
    let mut registration = pg_sys::BackgroundWorker::from(&builder);
    let mut handle = core::ptr::null_mut();
    // SAFETY: both live through the call, which copies the registration.
    let is_registered =
        unsafe { pg_sys::RegisterDynamicBackgroundWorker(&mut registration, &mut handle) };
    is_registered.then(|| Started { handle })
}

/// A worker asked for.
pub struct Started {
    handle: *mut pg_sys::BackgroundWorkerHandle,
}

impl Started {
    /// Whether it has ended, or could not even be forked.
    pub fn has_ended(&self) -> bool {
        let mut pid = 0;
        // SAFETY: the handle is ours until dropped.
        let status = unsafe { pg_sys::GetBackgroundWorkerPid(self.handle, &mut pid) };
        status == pg_sys::BgwHandleStatus::BGWH_STOPPED
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: palloc'd by RegisterDynamicBackgroundWorker in the launcher's
            // long-lived context, and nobody else's.
            unsafe { pg_sys::pfree(self.handle.cast()) };
        }
    }
}

/// The first thing a worker does. The handlers come before anything that can wait:
/// a worker that connects to a database being dropped waits for its lock, and only
/// `die` gets it out of there.
pub fn begin() {
    // SAFETY: the handlers are the server's own; signals are blocked until the last.
    unsafe {
        compat::on_signal(SIGHUP, raw::SignalHandlerForConfigReload);
        compat::on_signal(SIGINT, raw::StatementCancelHandler);
        compat::on_signal(SIGTERM, raw::die);
        pg_sys::BackgroundWorkerUnblockSignals();
    }
}

/// Connects to the shared catalogs only.
pub fn connect_to_none() {
    // SAFETY: no database, the bootstrap superuser.
    unsafe {
        let nothing = core::ptr::null();
        pg_sys::BackgroundWorkerInitializeConnection(nothing, nothing, 0);
    }
    pin_settings();
}

/// Connects as the bootstrap superuser. FATAL where the database is gone or closed.
pub fn connect(database: u32) {
    // SAFETY: any OID is checked by InitPostgres.
    unsafe {
        pg_sys::BackgroundWorkerInitializeConnectionByOid(
            pg_sys::Oid::from(database),
            pg_sys::InvalidOid,
            0,
        );
    }
    pin_settings();
}

/// What ALTER DATABASE or ALTER ROLE ... SET must not change for a superuser that
/// runs our statements. PGC_S_OVERRIDE outranks those and every reload
/// (autovacuum.c does the same).
fn pin_settings() {
    const PINS: &[(&CStr, &CStr)] = &[
        (c"role", c"none"),
        (c"search_path", c"pg_catalog, pg_temp"),
        (c"application_name", c"awa"),
        (c"session_replication_role", c"origin"),
        (c"default_transaction_read_only", c"off"),
        (c"default_transaction_deferrable", c"off"),
        (c"default_transaction_isolation", c"read committed"),
        (c"synchronous_commit", c"local"),
        (c"statement_timeout", c"0"),
        // A row or table that somebody holds for long holds up one step, not the worker.
        (c"lock_timeout", c"2s"),
        (c"idle_in_transaction_session_timeout", c"0"),
        (c"idle_session_timeout", c"0"),
        (c"default_tablespace", c""),
        (c"default_table_access_method", c"heap"),
        (c"row_security", c"off"),
        (c"check_function_bodies", c"on"),
        (c"standard_conforming_strings", c"on"),
        (c"transform_null_equals", c"off"),
        (c"quote_all_identifiers", c"off"),
        (c"datestyle", c"ISO, YMD"),
        (c"intervalstyle", c"postgres"),
        (c"bytea_output", c"hex"),
        (c"zero_damaged_pages", c"off"),
        (c"jit", c"off"),
        (c"max_parallel_workers_per_gather", c"0"),
        (c"plan_cache_mode", c"auto"),
    ];
    // SAFETY: the names and values are constants that every supported major knows.
    unsafe {
        let bootstrap = pg_sys::Oid::from(pg_sys::BOOTSTRAP_SUPERUSERID);
        if pg_sys::GetSessionUserId() != bootstrap {
            pg_sys::SetSessionAuthorization(bootstrap, true);
        }
        for (name, value) in PINS.iter().chain(compat::PINS) {
            pg_sys::SetConfigOption(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_OVERRIDE,
            );
        }
    }
}

/// Runs `body` in a transaction of its own, with a snapshot. If it fails, by an
/// error returned or raised, the transaction is rolled back and the error returned:
/// the process goes on.
pub fn in_transaction<T>(activity: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = boundary::catch(|| {
        // SAFETY: the order of worker_spi.c; not in a transaction here.
        unsafe {
            pg_sys::SetCurrentStatementStartTimestamp();
            pg_sys::StartTransactionCommand();
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        }
        report_activity(Some(activity));
        let value = body()?;
        // SAFETY: pairs with the above.
        unsafe {
            pg_sys::PopActiveSnapshot();
            pg_sys::CommitTransactionCommand();
        }
        Ok(value)
    });
    if outcome.is_err() {
        roll_back();
    }
    // SAFETY: outside a transaction.
    unsafe {
        pg_sys::pgstat_report_stat(true);
    }
    report_activity(None);
    outcome
}

/// For a body of `in_transaction` that ends by an error only.
#[cfg(feature = "debug_points")]
pub fn let_go_of_snapshot() {
    // SAFETY: the one that `in_transaction` pushed; the abort does not ask for it.
    unsafe { pg_sys::PopActiveSnapshot() };
}

/// The error exit of PostgresMain (postgres.c).
fn roll_back() {
    // SAFETY: the error was copied and flushed when it became a panic. A panic of our
    // own has not reset the hold-off counts as errfinish would have (elog.c); any
    // lock they stand for is released by the abort.
    unsafe {
        pg_sys::InterruptHoldoffCount = 1;
        pg_sys::QueryCancelHoldoffCount = 0;
        pg_sys::QueryCancelPending = 0;
        pg_sys::AbortCurrentTransaction();
        pg_sys::InterruptHoldoffCount = 0;
    }
}

fn report_activity(activity: Option<&str>) {
    // SAFETY: the text is copied.
    unsafe {
        match activity.map(std::ffi::CString::new) {
            Some(Ok(text)) => {
                pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, text.as_ptr())
            }
            _ => {
                pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_IDLE, core::ptr::null())
            }
        }
    }
}

/// Sleeps until somebody sets the latch, at most `timeout`; then does what signals
/// asked for. Ends the process when the postmaster is gone. Outside a transaction.
/// Whether the settings were read again.
pub fn wait(timeout: Option<Duration>) -> bool {
    sleep(timeout.unwrap_or(LONGEST_WAIT));
    // SAFETY: plain flags of the process. A cancel meant for a step that has ended
    // meanwhile must not hit the next one (PostgresMain does the same when idle).
    unsafe {
        pg_sys::QueryCancelPending = 0;
    }
    pg_sys::check_for_interrupts!();
    // SAFETY: outside a transaction, where files may be re-read.
    unsafe {
        let is_reload = pg_sys::ConfigReloadPending != 0;
        if is_reload {
            pg_sys::ConfigReloadPending = 0;
            pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
        }
        is_reload
    }
}

fn sleep(timeout: Duration) {
    let millis = timeout.min(LONGEST_WAIT).as_nanos().div_ceil(1_000_000);
    // SAFETY: our own latch.
    unsafe {
        pg_sys::WaitLatch(
            pg_sys::MyLatch,
            (pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH) as c_int,
            millis as c_long,
            compat::wait_event(),
        );
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
}

/// Calls `tell(arg)` when this process ends, however it ends. Registered before the
/// connection is made, it runs after this process has left the array of processes
/// (callbacks run last in, first out; InitPostgres registers RemoveProcFromArray):
/// whoever is told can rely on the database having one user less.
pub fn at_exit(arg: u32, tell: fn(u32)) {
    thread_local! {
        static TELL: core::cell::Cell<Option<fn(u32)>> = const { core::cell::Cell::new(None) };
    }

    #[pg_guard]
    unsafe extern "C-unwind" fn on_exit(_code: c_int, arg: pg_sys::Datum) {
        if let Some(tell) = TELL.get() {
            tell(arg.value() as u32);
        }
    }

    TELL.set(Some(tell));
    // SAFETY: the callback is a plain function.
    unsafe { pg_sys::on_shmem_exit(Some(on_exit), pg_sys::Datum::from(arg as usize)) };
}

pub fn this_process() -> Process {
    Process { pid: latch::my_pid(), number: latch::my_proc_number() }
}

/// Sets the latch of a process. One that has ended meanwhile: whoever has its place
/// now looks up once for nothing.
pub fn wake(process: Process) {
    latch::set_latch_of(process.number);
}

/// Under the registry's lock, so that the pid cannot be anybody else's.
pub fn terminate(pid: i32) {
    signal(pid, SIGTERM);
}

/// Cancels the step a worker is in; nothing while it is idle. As `terminate`.
pub fn cancel(pid: i32) {
    signal(pid, SIGINT);
}

fn signal(pid: i32, signal: c_int) {
    if pid > 0 {
        // SAFETY: a system call; to be late is harmless.
        unsafe { raw::kill(pid, signal) };
    }
}

/// Microseconds of the server's clock.
pub fn clock() -> i64 {
    // SAFETY: reads the clock.
    unsafe { pg_sys::GetCurrentTimestamp() }
}

/// Ends the process: 1 so that the postmaster restarts those it restarts.
pub fn exit(code: i32) -> ! {
    // SAFETY: runs the exit callbacks.
    unsafe { pg_sys::proc_exit(code) }
}

pub fn log(message: &str) {
    pgrx::log!("{message}");
}

/// Writes an error that the process survives to the server's log.
pub fn warn(what: &str, error: &Error) {
    let mut report = pg_sys::panic::ErrorReport::new(
        PgSqlErrorCode::ERRCODE_WARNING,
        format!("{what}: {}", error.message),
        "awa",
    );
    if let Some(detail) = &error.detail {
        report = report.set_detail(detail.clone().into_owned());
    }
    if let Some(hint) = &error.hint {
        report = report.set_hint(hint.clone().into_owned());
    }
    report.report(PgLogLevel::WARNING);
}

/// An ERROR of the server itself, for tests.
#[cfg(feature = "debug_points")]
pub fn raise(message: &str) -> ! {
    // SAFETY: no such role: raises.
    unsafe {
        let name = std::ffi::CString::new(message).unwrap_or_default();
        pg_sys::get_role_oid(name.as_ptr(), false);
    }
    unreachable!("a role is named {message}")
}
