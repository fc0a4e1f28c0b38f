//! Where the supervisor's registry lies: at the start of the shared block, under the
//! first lock of the tranche.

use core::mem::{align_of, size_of};

use super::{guc, lwlock, shmem};
use crate::supervisor::registry::{Entry, Header, Registry};

/// Its lock in the tranche.
pub const LOCK: usize = 0;

/// What follows in the block starts on a cache line of its own.
const ALIGN: usize = 64;

const ENTRIES_AT: usize = size_of::<Header>().next_multiple_of(align_of::<Entry>());

/// Bytes for the registry, a multiple of 64. For `_PG_init`, after the settings.
pub fn size() -> usize {
    (ENTRIES_AT + slots() * size_of::<Entry>()).next_multiple_of(ALIGN)
}

fn slots() -> usize {
    Registry::slots(guc::max_databases())
}

/// Runs `act` on the registry, locked. `act` may do arithmetic and signal processes,
/// nothing else. None where the library was not preloaded.
pub fn with<R>(act: impl FnOnce(&mut Registry<'_>) -> R) -> Option<R> {
    let base = shmem::base()?;
    let _guard = lwlock::acquire(LOCK);
    // SAFETY: `size()` bytes at the start of the block are ours, max_databases cannot
    // change while the server runs, zeroed memory is a valid Header and Entry, and
    // the lock makes these the only references.
    unsafe {
        let header: *mut Header = base.as_ptr().cast();
        let entries: *mut Entry = base.as_ptr().add(ENTRIES_AT).cast();
        let mut registry = Registry {
            header: &mut *header,
            entries: core::slice::from_raw_parts_mut(entries, slots()),
        };
        Some(act(&mut registry))
    }
}
