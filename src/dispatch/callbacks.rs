//! The ends of transactions and backends: acts of the undo log become facts, or never
//! happened.
//!
//! The commit callback runs after ProcArrayEndTransaction, so everybody sees the rows,
//! and before the transaction's lock on its own xid goes (xact.c, CommitTransaction): who
//! finds a row that memory does not know waits for that lock and asks memory again.

use super::session::{leave_wait, with_log};
use crate::domain::dispatcher::Dispatcher;
use crate::domain::undo::{Act, End, Entry};
use crate::error::{Error, Result, SqlState};
use crate::pg::{debug_point::debug_point, exit, latch, xact};

/// To be called once a backend, before its first act.
pub fn install() {
    xact::set_handlers(xact::Handlers {
        pre_commit,
        commit,
        abort,
        pre_prepare,
        prepare,
        sub_start: None,
        sub_commit,
        sub_abort,
        on_panic: |_| super::suspect_all(super::LOCK),
    });
    exit::on_exit(leave);
}

fn pre_commit() -> Result<()> {
    let claims = with_log(|log| log.entries().iter().filter(|e| is_claim(&e.act)).count());
    if claims == 0 {
        return Ok(());
    }
    if super::with(|d| with_log(|log| log.entries().iter().any(|e| d.owner_is_dead(e)))) {
        return Err(runtime_gone());
    }
    let only_claims = with_log(|log| log.len() == claims);
    if only_claims {
        // A crash that forgets a claim delivers its jobs again, which is what a crash of the
        // worker does too. Nothing else may ride on this commit (see store::claims).
        xact::commit_async_if_last_record_is(crate::store::claims::last_record());
    }
    Ok(())
}

fn is_claim(act: &Act) -> bool {
    matches!(act, Act::Claim { .. })
}

fn commit() {
    debug_point!("commit_before_callback");
    if !with_log(|log| log.is_empty()) {
        let now = xact::micros();
        super::with(|d| {
            let outlived =
                with_log(|log| log.entries().iter().any(|e| !e.act.is_farewell() && d.outlived(e)));
            // What a rebuild made doubts of came before the rest of the log.
            settle_own(d, outlived, true, now);
            with_log(|log| {
                for entry in log.entries().iter().filter(|e| !e.act.is_farewell()) {
                    d.settle(entry, now);
                }
            });
            with_log(|log| {
                for entry in log.entries().iter().filter(|e| e.act.is_farewell()) {
                    d.settle(entry, now);
                }
            });
        });
    }
    forget();
    super::replay::committed();
}

/// Memory was rebuilt under this transaction: what replay restored of its acts ends here. The
/// commit log is not asked, for nothing may fail in a callback.
fn settle_own(d: &mut Dispatcher<'_>, outlived: bool, committed: bool, now: i64) {
    if outlived {
        xact::for_each_own_xid(|xid| d.settle_doubts(xid, committed, now));
    }
}

/// Nothing of this transaction is left to remember.
fn forget() {
    with_log(|log| log.clear());
    super::session::set_prepared(None);
    super::wait::done();
    super::enqueue::forget_written_lanes();
    crate::store::claims::forget_last_record();
}

fn abort() {
    if !with_log(|log| log.is_empty()) {
        let now = xact::micros();
        let prepared = super::session::prepared();
        super::with(|d| {
            if let Some((xid, first)) = prepared {
                d.drop_doubts(xid, first);
            }
            let mut outlived = false;
            with_log(|log| {
                while let Some(entry) = log.pop() {
                    outlived |= d.outlived(&entry);
                    d.undo(&entry, now);
                }
            });
            settle_own(d, outlived, false, now);
        });
    }
    super::session::abandon_write();
    leave_wait();
    forget();
    super::replay::aborted();
}

fn sub_commit(subxact: u32, parent: u32) {
    with_log(|log| log.relabel(subxact, parent));
}

fn sub_abort(subxact: u32, _parent: u32) {
    super::enqueue::forget_written_lanes();
    super::session::abandon_write();
    // Whatever the wait was for, this subtransaction was in the way of it.
    leave_wait();
    if with_log(|log| log.is_empty()) {
        return;
    }
    let now = xact::micros();
    super::with(|d| {
        let mut outlived = false;
        with_log(|log| {
            while let Some(entry) = log.pop_from(subxact) {
                outlived |= d.outlived(&entry);
                d.undo(&entry, now);
            }
        });
        settle_own(d, outlived, false, now);
    });
}

/// A claim cannot be prepared: its items would be open to nobody. The rest is kept in
/// shared memory until somebody learns how the prepared transaction ended.
fn pre_prepare() -> Result<()> {
    let (any, bound) =
        with_log(|log| (!log.is_empty(), log.entries().iter().any(|e| !e.act.may_be_prepared())));
    if bound {
        return Err(Error::new(
            SqlState::FEATURE_NOT_SUPPORTED,
            "cannot PREPARE a transaction that has claimed jobs, registered a runtime or maintained segments",
        )
        .hint("Commit the claim before the work, or complete without two-phase commit."));
    }
    if !any {
        return Ok(());
    }
    // Doubts of subtransactions are settled one by one, and what is said of an attempt in no
    // other order than it was.
    let said = |e: &Entry| matches!(e.act, Act::Close { end: End::Kept(_), .. });
    if super::with(|d| with_log(|log| log.entries().iter().any(|e| said(e) && d.outlived(e)))) {
        return Err(super::replaying());
    }
    let xid = xact::top_xid();
    match super::with(|d| with_log(|log| d.keep_doubts(xid, log.entries()))) {
        Some(first) => {
            super::session::set_prepared(Some((xid, first)));
            Ok(())
        }
        None => Err(Error::new(SqlState::CAPACITY, "too many acts in prepared transactions")
            .detail(format!(
                "All prepared transactions together may hold {} acts: an enqueue takes one for \
                 each call and lane, a close one for each job.",
                super::capacities().doubts
            ))),
    }
}

fn prepare() {
    forget();
}

/// The backend ends. Its last transaction was aborted before (ShutdownPostgres is a
/// before_shmem_exit callback), so what it held is open again when its runtimes die.
fn leave() {
    let (proc, pid) = (latch::my_proc_number(), latch::my_pid());
    super::with(|d| {
        d.abandon_wait(proc);
        d.bury_session(proc, pid);
    });
}

/// Settles the acts of transactions that have ended without their own backend: prepared
/// ones, and those that were open while memory was rebuilt.
pub fn probe_doubts() {
    let mut from = 0;
    while let Some((next, xid)) = super::with(|d| d.next_doubt(from)) {
        from = next;
        if xact::is_in_progress(xid) {
            continue;
        }
        let (committed, now) = (xact::did_commit(xid), xact::micros());
        super::with(|d| d.settle_doubts(xid, committed, now));
    }
}

/// AW002.
pub fn runtime_gone() -> Error {
    Error::new(SqlState::RUNTIME_GONE, "the runtime is unknown or was declared dead")
        .detail("Its open attempts have been given to others.")
        .hint("Register a new runtime.")
}
