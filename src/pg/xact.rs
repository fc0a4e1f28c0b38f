//! Transactions: what happens at their ends, their ids, their limits.

use core::cell::Cell;
use core::ffi::{c_int, c_void};
use core::ptr;
use core::time::Duration;

use pgrx::pg_sys;

use super::boundary;
use super::datum::Timestamp;
use crate::error::{Error, Result, SqlState};

/// What is called at the ends of an armed transaction.
///
/// `commit`, `prepare`, `abort` and the subtransaction handlers run where the server
/// can no longer bear an ERROR (in COMMIT it would be a PANIC of the cluster): they
/// only do arithmetic. What they throw all the same is swallowed and told to
/// `on_panic`.
#[derive(Clone, Copy)]
pub struct Handlers {
    pub pre_commit: fn() -> Result<()>,
    pub commit: fn(),
    pub abort: fn(),
    pub pre_prepare: fn() -> Result<()>,
    pub prepare: fn(),
    pub sub_start: Option<fn(sub: u32, parent: u32)>,
    pub sub_commit: fn(sub: u32, parent: u32),
    pub sub_abort: fn(sub: u32, parent: u32),
    pub on_panic: fn(&str),
}

thread_local! {
    static HANDLERS: Cell<Option<Handlers>> = const { Cell::new(None) };
    static ARMED: Cell<bool> = const { Cell::new(false) };
    static SYNCHRONOUS_COMMIT: Cell<Option<c_int>> = const { Cell::new(None) };
}

/// Registers the handlers, for the rest of this process's life. Calls after the first
/// only replace them.
pub fn set_handlers(handlers: Handlers) {
    if HANDLERS.replace(Some(handlers)).is_none() {
        // SAFETY: both callbacks keep every panic to themselves. The server runs them
        // for each transaction of the backend; there is no way back, hence `arm`.
        unsafe {
            pg_sys::RegisterXactCallback(Some(on_xact), ptr::null_mut());
            pg_sys::RegisterSubXactCallback(Some(on_subxact), ptr::null_mut());
        }
    }
}

unsafe extern "C-unwind" {
    /// xact.h; not in the bindings.
    fn xactGetCommittedChildren(xids: *mut *mut pg_sys::TransactionId) -> c_int;
    /// subtrans.h; not in the bindings.
    fn SubTransGetTopmostTransaction(xid: pg_sys::TransactionId) -> pg_sys::TransactionId;
}

/// Asks for the handlers at the end of the running transaction. Disarmed by its end.
pub fn arm() {
    ARMED.set(true);
}

pub fn is_armed() -> bool {
    ARMED.get()
}

fn armed_handlers() -> Option<Handlers> {
    if ARMED.get() { HANDLERS.get() } else { None }
}

fn quietly(handlers: &Handlers, body: impl FnOnce()) {
    if let Err(message) = boundary::swallow(body) {
        // A second panic in `on_panic` has nowhere to go.
        let _ = boundary::swallow(|| (handlers.on_panic)(&message));
    }
}

unsafe extern "C-unwind" fn on_xact(event: pg_sys::XactEvent::Type, _: *mut c_void) {
    use pg_sys::XactEvent::*;
    if matches!(event, XACT_EVENT_COMMIT | XACT_EVENT_ABORT | XACT_EVENT_PREPARE) {
        restore_synchronous_commit();
    }
    let Some(handlers) = armed_handlers() else { return };
    match event {
        // SAFETY: called by CommitTransaction or PrepareTransaction before the point
        // of no return, and this frame owns nothing.
        XACT_EVENT_PRE_COMMIT => unsafe { boundary::run(handlers.pre_commit) },
        // SAFETY: as above.
        XACT_EVENT_PRE_PREPARE => unsafe { boundary::run(handlers.pre_prepare) },
        XACT_EVENT_COMMIT => {
            ARMED.set(false);
            quietly(&handlers, handlers.commit);
        }
        XACT_EVENT_ABORT => {
            ARMED.set(false);
            quietly(&handlers, handlers.abort);
        }
        XACT_EVENT_PREPARE => {
            ARMED.set(false);
            quietly(&handlers, handlers.prepare);
        }
        // Parallel workers take no part: nothing of ours is parallel safe.
        _ => {}
    }
}

unsafe extern "C-unwind" fn on_subxact(
    event: pg_sys::SubXactEvent::Type,
    sub: pg_sys::SubTransactionId,
    parent: pg_sys::SubTransactionId,
    _: *mut c_void,
) {
    use pg_sys::SubXactEvent::*;
    let Some(handlers) = armed_handlers() else { return };
    match event {
        SUBXACT_EVENT_START_SUB => {
            if let Some(start) = handlers.sub_start {
                quietly(&handlers, || start(sub, parent));
            }
        }
        SUBXACT_EVENT_COMMIT_SUB => quietly(&handlers, || (handlers.sub_commit)(sub, parent)),
        SUBXACT_EVENT_ABORT_SUB => quietly(&handlers, || (handlers.sub_abort)(sub, parent)),
        _ => {}
    }
}

/// 40001 unless all rows could be deleted that were found as they are now: under a snapshot of
/// the whole transaction, those are missed that are younger.
pub fn ensure_seen(all: bool) -> Result<()> {
    if all || isolation() == Isolation::ReadCommitted {
        return Ok(());
    }
    Err(not_serializable())
}

/// 40001, as the server says it.
pub fn not_serializable() -> Error {
    Error::new(SqlState(*b"40001"), "could not serialize access due to concurrent update")
}

/// The session's lock_timeout; None: it waits for ever.
pub fn lock_timeout() -> Option<Duration> {
    // SAFETY: a setting, in milliseconds.
    let millis = unsafe { pg_sys::LockTimeout };
    u64::try_from(millis).ok().filter(|millis| *millis > 0).map(Duration::from_millis)
}

pub fn deadlock_timeout() -> Duration {
    // SAFETY: a setting, in milliseconds.
    Duration::from_millis(u64::try_from(unsafe { pg_sys::DeadlockTimeout }).unwrap_or(1000))
}

/// Runs `body` in a subtransaction: what it did is undone if it fails, by an error returned
/// or raised, and the transaction goes on.
pub fn attempt<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // SAFETY: in a transaction; context and owner are put back as plpgsql does
    // (exec_stmt_block, pl_exec.c), and an error is copied before it is undone.
    unsafe {
        let (context, owner) = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(ptr::null());
        pg_sys::CurrentMemoryContext = context;
        let outcome = boundary::catch(body);
        pg_sys::CurrentMemoryContext = context;
        match &outcome {
            Ok(_) => pg_sys::ReleaseCurrentSubTransaction(),
            Err(_) => pg_sys::RollbackAndReleaseCurrentSubTransaction(),
        }
        pg_sys::CurrentMemoryContext = context;
        pg_sys::CurrentResourceOwner = owner;
        outcome
    }
}

/// The top transaction's id, assigned if need be.
pub fn top_xid() -> u32 {
    // SAFETY: raises where no id can be assigned.
    unsafe { pg_sys::GetTopTransactionId() }.into_inner()
}

pub fn top_xid_if_any() -> Option<u32> {
    // SAFETY: reads backend-local state.
    let xid = unsafe { pg_sys::GetTopTransactionIdIfAny() };
    (xid != pg_sys::TransactionId::INVALID).then_some(xid.into_inner())
}

/// Calls `each` with every xid under which the ending (sub)transaction wrote rows: its own,
/// and those of the subtransactions that committed into it. For the handlers of its end.
pub fn for_each_own_xid(mut each: impl FnMut(u32)) {
    let mut children = ptr::null_mut();
    // SAFETY: reads backend-local state; the array is the transaction's (xact.c frees it in
    // its clean-up, after the callbacks).
    let (own, children) = unsafe {
        let count = xactGetCommittedChildren(&mut children);
        let children: &[pg_sys::TransactionId] = if children.is_null() {
            &[]
        } else {
            core::slice::from_raw_parts(children, usize::try_from(count).unwrap_or(0))
        };
        (pg_sys::GetCurrentTransactionIdIfAny(), children)
    };
    if own != pg_sys::TransactionId::INVALID {
        each(own.into_inner());
    }
    for child in children {
        each(child.into_inner());
    }
}

/// The top transaction of a subtransaction that is in progress, or was when this
/// transaction took its snapshot.
pub fn top_of(xid: u32) -> u32 {
    // SAFETY: pg_subtrans is kept for whatever our snapshot sees as running.
    unsafe { SubTransGetTopmostTransaction(xid.into()) }.into_inner()
}

/// 1 in the top transaction, and a number of its own in each subtransaction.
pub fn current_subxact() -> u32 {
    // SAFETY: reads backend-local state.
    unsafe { pg_sys::GetCurrentSubTransactionId() }
}

/// Whether this backend is in a transaction that has not failed.
pub fn is_in_transaction() -> bool {
    // SAFETY: reads backend-local state.
    unsafe { pg_sys::IsTransactionState() }
}

/// Of any backend, this one included, and of prepared transactions. To be asked
/// before `did_commit` (heapam_visibility.c explains the order).
pub fn is_in_progress(xid: u32) -> bool {
    // SAFETY: looks at the proc array.
    unsafe { pg_sys::TransactionIdIsInProgress(xid.into()) }
}

/// Whether `xid` is this transaction or one of its live subtransactions.
pub fn is_current(xid: u32) -> bool {
    // SAFETY: reads backend-local state.
    unsafe { pg_sys::TransactionIdIsCurrentTransactionId(xid.into()) }
}

/// `xid` must be recent enough for the commit log to know it.
pub fn did_commit(xid: u32) -> bool {
    // SAFETY: looks at the commit log.
    unsafe { pg_sys::TransactionIdDidCommit(xid.into()) }
}

/// False also for one that a crash ended; `!is_in_progress && !did_commit` is the
/// test that covers it.
pub fn did_abort(xid: u32) -> bool {
    // SAFETY: looks at the commit log.
    unsafe { pg_sys::TransactionIdDidAbort(xid.into()) }
}

/// Waits through the lock manager until `xid` has ended, its callbacks included: its
/// lock is released after they ran (CommitTransaction). Deadlocks, lock_timeout and
/// cancel work as for any lock. Returns at once for our own transaction's past
/// subtransactions, and must not be called for our own xid.
pub fn wait_for_xid(xid: u32) {
    // SAFETY: without a relation there is no error context to add.
    unsafe {
        pg_sys::XactLockTableWait(
            xid.into(),
            ptr::null_mut(),
            ptr::null_mut(),
            pg_sys::XLTW_Oper::XLTW_None,
        );
    }
}

/// Makes what the transaction wrote so far visible to its next command.
pub fn command_counter_increment() {
    // SAFETY: in a transaction.
    unsafe { pg_sys::CommandCounterIncrement() }
}

/// 25006 or 25000 where `command` must not write, in the words of utility.c.
pub fn ensure_writable(command: &str) -> Result<()> {
    ensure_not_read_only(command)?;
    ensure_not_parallel(command)
}

pub fn ensure_not_read_only(command: &str) -> Result<()> {
    if is_in_recovery() {
        return Err(Error::new(
            SqlState::READ_ONLY_TRANSACTION,
            format!("cannot execute {command} during recovery"),
        ));
    }
    // SAFETY: backend-local.
    if unsafe { pg_sys::XactReadOnly } {
        return Err(Error::new(
            SqlState::READ_ONLY_TRANSACTION,
            format!("cannot execute {command} in a read-only transaction"),
        ));
    }
    Ok(())
}

pub fn ensure_not_parallel(command: &str) -> Result<()> {
    // SAFETY: reads backend-local state.
    if unsafe { pg_sys::IsInParallelMode() } {
        return Err(Error::new(
            SqlState(*b"25000"),
            format!("cannot execute {command} during a parallel operation"),
        ));
    }
    Ok(())
}

/// On a standby, or before recovery has ended.
pub fn is_in_recovery() -> bool {
    // SAFETY: reads shared state.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// Whom privileges are checked for.
pub fn user_id() -> u32 {
    // SAFETY: reads backend-local state.
    unsafe { pg_sys::GetUserId() }.into()
}

pub fn is_superuser(role: u32) -> bool {
    // SAFETY: looks in the system cache.
    unsafe { pg_sys::superuser_arg(role.into()) }
}

/// The end of the last WAL record this transaction wrote; 0 for none.
pub fn last_rec_end() -> u64 {
    // SAFETY: backend-local.
    unsafe { pg_sys::XactLastRecEnd }
}

/// Whether this transaction's commit is going to wait for the flush of its WAL.
pub fn synchronous_commit() -> bool {
    // SAFETY: backend-local.
    unsafe { pg_sys::synchronous_commit > pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as c_int }
}

/// Lets this transaction commit without waiting for the flush. Only from
/// `pre_commit`: the variable behind the setting is put back in the commit or abort
/// callback, before the setting's own machinery looks at it.
pub fn set_synchronous_commit_off_for_this_commit() {
    // SAFETY: backend-local; RecordTransactionCommit (xact.c) reads nothing else.
    unsafe {
        if SYNCHRONOUS_COMMIT.get().is_none() {
            SYNCHRONOUS_COMMIT.set(Some(pg_sys::synchronous_commit));
        }
        pg_sys::synchronous_commit = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as c_int;
    }
}

/// As above, if nothing was written to WAL after `record`.
pub fn commit_async_if_last_record_is(record: u64) {
    if record != 0 && record == last_rec_end() {
        set_synchronous_commit_off_for_this_commit();
    }
}

fn restore_synchronous_commit() {
    if let Some(level) = SYNCHRONOUS_COMMIT.take() {
        // SAFETY: backend-local.
        unsafe { pg_sys::synchronous_commit = level }
    }
}

/// Makes this transaction's commit wait for its flush whatever synchronous_commit is.
pub fn force_synchronous_commit() {
    // SAFETY: sets a flag of the transaction.
    unsafe { pg_sys::ForceSyncCommit() }
}

/// Flushes the WAL this transaction wrote so far.
pub fn flush_wal() {
    let end = last_rec_end();
    if end != 0 {
        // SAFETY: a position we wrote up to.
        unsafe { pg_sys::XLogFlush(end) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Isolation {
    ReadUncommitted,
    ReadCommitted,
    RepeatableRead,
    Serializable,
}

pub fn isolation() -> Isolation {
    // SAFETY: backend-local; the values are those of xact.h.
    match unsafe { pg_sys::XactIsoLevel } {
        0 => Isolation::ReadUncommitted,
        1 => Isolation::ReadCommitted,
        2 => Isolation::RepeatableRead,
        _ => Isolation::Serializable,
    }
}

/// The clock, in microseconds since 2000.
pub fn micros() -> i64 {
    now().0
}

/// The clock.
pub fn now() -> Timestamp {
    // SAFETY: reads the clock.
    Timestamp(unsafe { pg_sys::GetCurrentTimestamp() })
}

/// What `now()` is in SQL.
pub fn transaction_start() -> Timestamp {
    // SAFETY: reads backend-local state.
    Timestamp(unsafe { pg_sys::GetCurrentTransactionStartTimestamp() })
}

/// The transaction id that is given out next, with its epoch.
pub fn next_xid() -> u64 {
    // SAFETY: reads shared memory under its lock (varsup.c).
    unsafe { pg_sys::ReadNextFullTransactionId() }.value
}

/// The oldest transaction id that some snapshot of this database still takes for running.
pub fn oldest_visible() -> u64 {
    // SAFETY: reads shared memory; without a relation, the horizon of all databases
    // (GetOldestNonRemovableTransactionId, procarray.c).
    let oldest = unsafe { pg_sys::GetOldestNonRemovableTransactionId(core::ptr::null_mut()) };
    let next = next_xid();
    // The horizon is at most two billion behind the next one (FullXidRelativeTo, procarray.c).
    let behind = (next as u32).wrapping_sub(oldest.into());
    next.saturating_sub(u64::from(behind))
}

/// Whether a session other than ours has a snapshot for which some transaction before `next`
/// still runs. Ours may be older than that, as may what a standby tells of its own.
pub fn others_see_before(next: u64) -> bool {
    // Transaction ids below 3 are special, also after a wraparound (transam.h).
    let last = (1..=4).map(|n| next.saturating_sub(n) as u32).find(|xid| *xid >= 3).unwrap_or(3);
    let mut count = 0;
    // SAFETY: reads shared memory under its lock; the array is in the memory of the transaction
    // (GetCurrentVirtualXIDs, procarray.c, as used by WaitForOlderSnapshots, indexcmds.c).
    unsafe {
        let vacuums = pg_sys::PROC_IS_AUTOVACUUM | pg_sys::PROC_IN_VACUUM;
        pg_sys::GetCurrentVirtualXIDs(last.into(), true, true, vacuums as i32, &mut count);
    }
    count > 0
}
