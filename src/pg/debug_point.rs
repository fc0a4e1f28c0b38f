//! Named places where a test can stop a backend (feature `debug_points`).
//!
//! A backend that arrives at an armed point counts itself and sleeps until the point
//! is released. It uses no lock, no latch and raises nothing, so that points can stand
//! in callbacks and under locks. Between two calls of the server, any of which could
//! raise, a point may be `interruptible`: then a cancel is served right there, as it
//! would be in a lock or a read that happened to wait.

/// Stops here while a test has this point armed; nothing without the feature.
#[cfg(feature = "debug_points")]
#[allow(unused_macros)]
macro_rules! debug_point {
    ($name:expr) => {
        $crate::pg::debug_point::reach($name, false)
    };
    ($name:expr, interruptible) => {
        $crate::pg::debug_point::reach($name, true)
    };
}
#[cfg(not(feature = "debug_points"))]
#[allow(unused_macros)]
macro_rules! debug_point {
    ($name:expr $(, interruptible)?) => {};
}
#[allow(unused_imports)]
pub(crate) use debug_point;

#[cfg(feature = "debug_points")]
pub use enabled::*;

#[cfg(feature = "debug_points")]
mod enabled {
    use core::ffi::CStr;
    use core::ptr;
    use core::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

    use pgrx::pg_sys;

    use crate::error::{Error, Result};
    use crate::pg::call::{Call, Returned, sql_function};

    const POINTS: usize = 64;
    const NAME: &CStr = c"awa debug points";
    /// Of a point's name, as bytes in atomics: a test writes while backends read.
    const WIDTH: usize = 64;

    /// All zero is a free place.
    struct Point {
        name: [core::sync::atomic::AtomicU8; WIDTH],
        armed: AtomicU32,
        waiting: AtomicU32,
        /// Counts the releases, so that one cannot be missed by arming again at once.
        releases: AtomicU32,
    }

    static BASE: AtomicPtr<Point> = AtomicPtr::new(ptr::null_mut());

    fn points() -> &'static [Point] {
        let base = BASE.load(Ordering::Relaxed);
        if base.is_null() {
            return &[];
        }
        // SAFETY: POINTS of them, zeroed at start, and only atomics.
        unsafe { core::slice::from_raw_parts(base, POINTS) }
    }

    impl Point {
        fn is_called(&self, name: &str) -> bool {
            let bytes = name.as_bytes();
            bytes.len() < WIDTH
                && self
                    .name
                    .iter()
                    .zip(bytes.iter().copied().chain(core::iter::repeat(0)))
                    .all(|(have, want)| have.load(Ordering::Relaxed) == want)
        }

        fn take_name(&self, name: &str) {
            for (place, byte) in self.name.iter().zip(name.bytes()) {
                place.store(byte, Ordering::Relaxed);
            }
        }
    }

    pub(in crate::pg) fn request() {
        // SAFETY: called from shmem_request_hook.
        unsafe { pg_sys::RequestAddinShmemSpace(size_of::<[Point; POINTS]>()) }
    }

    pub(in crate::pg) fn attach() {
        let mut found = false;
        // SAFETY: called from shmem_startup_hook, under AddinShmemInitLock.
        unsafe {
            let size = size_of::<[Point; POINTS]>();
            let base = pg_sys::ShmemInitStruct(NAME.as_ptr(), size, &mut found);
            if !found {
                ptr::write_bytes(base.cast::<u8>(), 0, size);
            }
            BASE.store(base.cast(), Ordering::Relaxed);
        }
    }

    /// What `debug_point!` calls.
    pub fn reach(name: &str, interruptible: bool) {
        for point in points() {
            if point.armed.load(Ordering::Acquire) != 0 && point.is_called(name) {
                stop_at(point, interruptible);
                return;
            }
        }
    }

    fn stop_at(point: &Point, interruptible: bool) {
        let releases = point.releases.load(Ordering::Acquire);
        let holds = || {
            point.armed.load(Ordering::Acquire) != 0
                && point.releases.load(Ordering::Acquire) == releases
                && !must_leave()
        };
        while holds() {
            point.waiting.fetch_add(1, Ordering::AcqRel);
            while holds() && !(interruptible && is_interrupted()) {
                // SAFETY: sleeps; a signal cuts it short.
                unsafe { pg_sys::pg_usleep(1000) };
            }
            // Before the interrupt: the end of the process would leave us counted.
            point.waiting.fetch_sub(1, Ordering::AcqRel);
            if interruptible {
                pgrx::check_for_interrupts!();
            }
        }
    }

    /// Whether CHECK_FOR_INTERRUPTS would do something.
    fn is_interrupted() -> bool {
        // SAFETY: process-local flags.
        unsafe {
            pg_sys::InterruptPending != 0
                && pg_sys::InterruptHoldoffCount == 0
                && pg_sys::CritSectionCount == 0
        }
    }

    /// When the postmaster died, or we are asked to terminate and may.
    fn must_leave() -> bool {
        // SAFETY: process-local flags.
        unsafe {
            let is_orphan =
                std::os::unix::process::parent_id().cast_signed() != pg_sys::PostmasterPid;
            let may_die = pg_sys::InterruptHoldoffCount == 0 && pg_sys::CritSectionCount == 0;
            is_orphan || (may_die && pg_sys::ProcDiePending != 0)
        }
    }

    /// awa_debug_arm(text)
    fn arm(call: &mut Call) -> Result<Returned> {
        let name = call.text(0).unwrap_or_default();
        if name.is_empty() || name.len() >= WIDTH {
            return Err(Error::invalid("debug point needs a short name"));
        }
        let point = points()
            .iter()
            .find(|point| point.is_called(&name))
            .or_else(|| points().iter().find(|point| point.is_called("")))
            .ok_or_else(|| Error::invalid("too many debug points"))?;
        point.take_name(&name);
        point.armed.store(1, Ordering::Release);
        Ok(Returned::Void)
    }
    sql_function!(awa_debug_arm, arm);

    /// awa_debug_release(text)
    fn release(call: &mut Call) -> Result<Returned> {
        let name = call.text(0).unwrap_or_default();
        for point in points().iter().filter(|point| point.is_called(&name)) {
            point.armed.store(0, Ordering::Release);
            point.releases.fetch_add(1, Ordering::AcqRel);
        }
        Ok(Returned::Void)
    }
    sql_function!(awa_debug_release, release);

    /// awa_debug_waiting(text) returns int
    fn waiting(call: &mut Call) -> Result<Returned> {
        let name = call.text(0).unwrap_or_default();
        let waiting: u32 = points()
            .iter()
            .filter(|point| point.is_called(&name))
            .map(|point| point.waiting.load(Ordering::Acquire))
            .sum();
        Ok(Returned::value(i32::try_from(waiting).unwrap_or(i32::MAX)))
    }
    sql_function!(awa_debug_waiting, waiting);
}
