//! Guards over our tranche of lightweight locks.
//!
//! Nothing may raise, allocate from Postgres or wait while a guard is held; the
//! server holds cancel and terminate back meanwhile (LWLockAcquire does
//! HOLD_INTERRUPTS). Should a panic get through all the same, what the lock protects
//! is half-written: `on_poison` is told before anybody else can look at it.

use core::marker::PhantomData;

use pgrx::pg_sys;

use super::shmem;

#[must_use = "the lock is released when the guard is dropped"]
pub struct Guard {
    lock: *mut pg_sys::LWLock,
    number: usize,
    on_poison: Option<fn(usize)>,
    /// A lock belongs to the process, which has one thread.
    _not_send: PhantomData<*mut ()>,
}

/// Takes lock `n` exclusively.
///
/// Panics when the tranche has no such lock: a broken promise of the caller.
pub fn acquire(n: usize) -> Guard {
    lock(n, pg_sys::LWLockMode::LW_EXCLUSIVE)
}

/// Takes lock `n` shared.
pub fn acquire_shared(n: usize) -> Guard {
    lock(n, pg_sys::LWLockMode::LW_SHARED)
}

/// Takes lock `n` exclusively if that needs no wait.
pub fn try_acquire(n: usize) -> Option<Guard> {
    let lock = find(n);
    // SAFETY: a lock of our tranche.
    let taken = unsafe { pg_sys::LWLockConditionalAcquire(lock, pg_sys::LWLockMode::LW_EXCLUSIVE) };
    taken.then(|| Guard::over(lock, n))
}

/// Whether this backend holds lock `n`, for assertions.
pub fn is_held(n: usize) -> bool {
    // SAFETY: a lock of our tranche.
    unsafe { pg_sys::LWLockHeldByMe(find(n)) }
}

fn lock(n: usize, mode: pg_sys::LWLockMode::Type) -> Guard {
    let lock = find(n);
    // SAFETY: a lock of our tranche.
    unsafe { pg_sys::LWLockAcquire(lock, mode) };
    Guard::over(lock, n)
}

fn find(n: usize) -> *mut pg_sys::LWLock {
    match shmem::lock(n) {
        Some(lock) => lock,
        None => panic!("awa has no lightweight lock number {n}"),
    }
}

impl Guard {
    fn over(lock: *mut pg_sys::LWLock, number: usize) -> Self {
        Self { lock, number, on_poison: None, _not_send: PhantomData }
    }

    /// Called with the lock's number when the guard is dropped by a panic, before
    /// the lock is released. It must do nothing but store.
    pub fn on_poison(mut self, tell: fn(usize)) -> Self {
        self.on_poison = Some(tell);
        self
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let panicking = std::thread::panicking();
        if panicking && let Some(tell) = self.on_poison {
            tell(self.number);
        }
        // SAFETY: our lock. An abort may already have released it (LWLockReleaseAll)
        // if one ran below us; releasing twice would raise. An ERROR has reset the
        // hold-off count which LWLockRelease counts down (errfinish, elog.c;
        // LWLockReleaseAll makes up for it in the same way).
        unsafe {
            if !panicking {
                pg_sys::LWLockRelease(self.lock);
            } else if pg_sys::LWLockHeldByMe(self.lock) {
                if pg_sys::InterruptHoldoffCount == 0 {
                    pg_sys::InterruptHoldoffCount = 1;
                }
                pg_sys::LWLockRelease(self.lock);
            }
        }
    }
}
