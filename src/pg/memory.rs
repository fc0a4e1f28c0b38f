//! Memory contexts for work that must not pile up in the caller's.

use pgrx::pg_sys;

/// Runs `body` in a context that is gone afterwards. Nothing it allocated from
/// Postgres may be used later.
pub fn in_temp_context<T>(body: impl FnOnce() -> T) -> T {
    Scratch::new().run(body)
}

/// A context to run the steps of a long loop in, emptied after each.
pub struct Scratch {
    context: pg_sys::MemoryContext,
}

impl Scratch {
    pub fn new() -> Self {
        Self { context: create() }
    }

    /// Runs one step and frees what it allocated from Postgres.
    pub fn run<T>(&mut self, step: impl FnOnce() -> T) -> T {
        let result = switched(self.context, step);
        // SAFETY: the context is ours and nothing else points into it.
        unsafe { pg_sys::MemoryContextReset(self.context) };
        result
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        delete(self.context);
    }
}

/// A child of the current context.
pub(super) fn create() -> pg_sys::MemoryContext {
    // SAFETY: the name is constant, as AllocSetContextCreate wants it.
    unsafe {
        pg_sys::AllocSetContextCreateInternal(
            pg_sys::CurrentMemoryContext,
            c"awa".as_ptr(),
            pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
            pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
            pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
        )
    }
}

/// While panicking it is left to the end of the transaction, which may have begun.
pub(super) fn delete(context: pg_sys::MemoryContext) {
    if !std::thread::panicking() {
        // SAFETY: ours, and not the current one: `switched` put that back.
        unsafe { pg_sys::MemoryContextDelete(context) }
    }
}

/// Runs `body` with `context` as the current one. A panic leaves it current: the
/// boundary puts its own back.
pub(super) fn switched<T>(context: pg_sys::MemoryContext, body: impl FnOnce() -> T) -> T {
    // SAFETY: a live context of the caller.
    unsafe {
        let previous = core::mem::replace(
            &mut *core::ptr::addr_of_mut!(pg_sys::CurrentMemoryContext),
            context,
        );
        let result = body();
        pg_sys::CurrentMemoryContext = previous;
        result
    }
}
