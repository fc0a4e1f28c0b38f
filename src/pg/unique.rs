//! Looking for a key in a unique index as the server's own unique check does: rows of
//! open transactions are seen, and say whose end decides.

use core::ffi::c_int;
use core::ptr;

use pgrx::pg_sys;

use super::compat;
use super::datum::{Datum, ToDatum};
use super::heap::{ReadSlot, Row, Table};
use super::lock::LockMode;

/// What became of a key, at this instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Look<T> {
    Absent,
    /// Committed, or our own.
    Present(T),
    /// Another transaction, still open, wrote or deleted the row.
    Open(u32),
}

/// Looks for `key` in `index`, a unique B-tree of the table on one bytea, and reads the
/// row that has it.
///
/// A dirty snapshot is no MVCC snapshot: it serves every isolation level and leaves no
/// trace for serializable transactions (SerializationNeededForRead, predicate.c).
pub fn look<T>(table: &Table, index: u32, key: &[u8], read: impl FnOnce(&Row) -> T) -> Look<T> {
    let value: Datum = key.to_datum();
    let mut snapshot = pg_sys::SnapshotData {
        snapshot_type: pg_sys::SnapshotType::SNAPSHOT_DIRTY,
        ..Default::default()
    };
    let slot = ReadSlot::new(table.relation());
    // SAFETY: one key on the first column, a bytea; the snapshot outlives the scan. The
    // way of check_exclusion_or_unique_constraint (execIndexing.c): a row that the scan
    // returns leaves in the snapshot the transaction that is not over, if any
    // (HeapTupleSatisfiesDirty, heapam_visibility.c).
    unsafe {
        let relation = pg_sys::index_open(index.into(), LockMode::AccessShare as i32);
        let scan =
            compat::index_beginscan(table.relation(), relation, ptr::addr_of_mut!(snapshot), 1);
        let mut equal: pg_sys::ScanKeyData = core::mem::zeroed();
        pg_sys::ScanKeyInit(
            &mut equal,
            1,
            pg_sys::BTEqualStrategyNumber as u16,
            pg_sys::F_BYTEAEQ.into(),
            value,
        );
        pg_sys::index_rescan(scan, &mut equal, 1 as c_int, ptr::null_mut(), 0);
        let forward = pg_sys::ScanDirection::ForwardScanDirection;
        let found = pg_sys::index_getnext_slot(scan, forward, slot.slot);
        let none = pg_sys::TransactionId::INVALID;
        let [xmin, xmax] = [
            ptr::addr_of!(snapshot.xmin).read_volatile(),
            ptr::addr_of!(snapshot.xmax).read_volatile(),
        ];
        let look = if !found {
            Look::Absent
        } else if xmin != none {
            Look::Open(xmin.into_inner())
        } else if xmax != none {
            Look::Open(xmax.into_inner())
        } else {
            Look::Present(read(&slot.row()))
        };
        pg_sys::index_endscan(scan);
        pg_sys::index_close(relation, LockMode::AccessShare as i32);
        look
    }
}
