//! The snapshots that direct access reads with.

use pgrx::pg_sys;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Snapshot {
    /// What is committed at this instant, and our own.
    SelfNow,
    /// Every row that is there, whatever became of its writer.
    Any,
    /// A new MVCC snapshot.
    Latest,
    /// That of the running command.
    Active,
}

/// A snapshot for as long as a scan lasts.
pub(super) struct Held {
    pointer: pg_sys::Snapshot,
    is_registered: bool,
}

impl Held {
    pub(super) fn take(snapshot: Snapshot) -> Self {
        // SAFETY: the static ones are constant; the latest is registered until drop;
        // the active one stays while its command runs.
        unsafe {
            match snapshot {
                Snapshot::SelfNow => Self::fixed(core::ptr::addr_of_mut!(pg_sys::SnapshotSelfData)),
                Snapshot::Any => Self::fixed(core::ptr::addr_of_mut!(pg_sys::SnapshotAnyData)),
                Snapshot::Active => Self::fixed(pg_sys::GetActiveSnapshot()),
                Snapshot::Latest => Self {
                    pointer: pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot()),
                    is_registered: true,
                },
            }
        }
    }

    fn fixed(pointer: pg_sys::Snapshot) -> Self {
        Self { pointer, is_registered: false }
    }

    pub(super) fn pointer(&self) -> pg_sys::Snapshot {
        self.pointer
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.is_registered && !std::thread::panicking() {
            // SAFETY: registered by `take`.
            unsafe { pg_sys::UnregisterSnapshot(self.pointer) }
        }
    }
}
