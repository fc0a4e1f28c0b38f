//! Looking into a bigint array column through a GIN index that may or may not be there.

use core::ffi::c_int;
use core::ptr;

use pgrx::pg_sys;

use super::datum;
use super::heap::{ReadSlot, Row, Table};
use super::lock::LockMode;
use super::snapshot::{Held, Snapshot};
use super::{compat, memory};
use crate::error::{Error, Result};

/// The operator family array_ops of GIN (pg_opfamily.dat). Others, intarray's for example,
/// have other strategies.
const ARRAY_OPS: u32 = 2745;
/// GinContainsStrategy (ginarrayproc.c): the column contains the argument.
const CONTAINS: u16 = 2;

impl Table {
    /// The index that finds rows by the elements of this array column: GIN, valid, over the
    /// whole table, and on that column alone. Its name says nothing.
    pub fn array_index(&self, column: i16) -> Option<u32> {
        // SAFETY: an open relation; the list is a copy of the relation cache's, and an index
        // of it is open while it is looked at.
        unsafe {
            let oids = pg_sys::RelationGetIndexList(self.relation());
            let count = if oids.is_null() { 0 } else { (*oids).length };
            let mut found = None;
            for i in 0..count {
                let oid = (*(*oids).elements.add(i as usize)).oid_value;
                let index = pg_sys::index_open(oid, LockMode::AccessShare as c_int);
                let fits = is_on_array(index, column);
                pg_sys::index_close(index, LockMode::AccessShare as c_int);
                if fits {
                    found = Some(oid.into());
                    break;
                }
            }
            pg_sys::list_free(oids);
            found
        }
    }

    /// Reads the rows whose array column has the value, until `each` returns false, and some
    /// that do not: a bitmap may forget which rows of a page it was for. `index` is what
    /// `array_index` found.
    pub fn index_array(
        &self,
        index: u32,
        value: i64,
        snapshot: Snapshot,
        mut each: impl FnMut(&Row) -> Result<bool>,
    ) -> Result<()> {
        let held = Held::take(snapshot);
        let pages = self.pages_with(index, value, &held);
        let slot = ReadSlot::new(self.relation());
        let missing = || Error::internal("the heap cannot fetch rows for an index");
        // SAFETY: an open heap relation, whose table access method has these functions, and a
        // snapshot that is held longer than the fetch.
        unsafe {
            let access = (*self.relation()).rd_tableam;
            let begin = (*access).index_fetch_begin.ok_or_else(missing)?;
            let fetch_tuple = (*access).index_fetch_tuple.ok_or_else(missing)?;
            let end = (*access).index_fetch_end.ok_or_else(missing)?;
            let fetch = begin(self.relation());
            let mut result = Ok(true);
            'rows: for (block, offsets) in &pages {
                for offset in offsets {
                    let mut tid = pg_sys::ItemPointerData {
                        ip_blkid: pg_sys::BlockIdData {
                            bi_hi: (block >> 16) as u16,
                            bi_lo: *block as u16,
                        },
                        ip_posid: *offset,
                    };
                    let (mut again, mut dead) = (false, false);
                    let pointer = held.pointer();
                    if fetch_tuple(fetch, &mut tid, pointer, slot.slot, &mut again, &mut dead) {
                        result = each(&slot.row());
                        if !matches!(result, Ok(true)) {
                            break 'rows;
                        }
                    }
                }
            }
            end(fetch);
            result.map(|_| ())
        }
    }

    /// Where the index says that rows with the value are: blocks, in order, and line pointers.
    fn pages_with(&self, index: u32, value: i64, held: &Held) -> Vec<(u32, Vec<u16>)> {
        // SAFETY: one key on the only column, an array of bigint; a bitmap of this backend.
        memory::in_temp_context(|| unsafe {
            let index = pg_sys::index_open(index.into(), LockMode::AccessShare as c_int);
            let scan = compat::index_beginscan_bitmap(index, held.pointer(), 1);
            let mut key: pg_sys::ScanKeyData = core::mem::zeroed();
            pg_sys::ScanKeyEntryInitialize(
                &mut key,
                0,
                1,
                CONTAINS,
                pg_sys::INT8ARRAYOID,
                pg_sys::InvalidOid,
                pg_sys::F_ARRAYCONTAINS.into(),
                datum::bigint_array(&[value]),
            );
            pg_sys::index_rescan(scan, &mut key, 1, ptr::null_mut(), 0);
            let bitmap = pg_sys::tbm_create(pg_sys::work_mem as _, ptr::null_mut());
            pg_sys::index_getbitmap(scan, bitmap);
            let pages = compat::bitmap_pages(bitmap);
            pg_sys::tbm_free(bitmap);
            pg_sys::index_endscan(scan);
            pg_sys::index_close(index, LockMode::AccessShare as c_int);
            pages
        })
    }
}

/// # Safety
/// `index` is an open index.
unsafe fn is_on_array(index: pg_sys::Relation, column: i16) -> bool {
    // SAFETY: the relation cache has these of every index; a key column has an attribute
    // number and an operator family.
    unsafe {
        let form = (*index).rd_index;
        (*(*index).rd_rel).relam == pg_sys::GIN_AM_OID
            && (*form).indisvalid
            && (*form).indisready
            // Rows that an older snapshot sees may lack an entry.
            && !(*form).indcheckxmin
            && (*form).indnatts == 1
            && *(*form).indkey.values.as_ptr() == column
            && u32::from(*(*index).rd_opfamily) == ARRAY_OPS
            && pg_sys::RelationGetIndexPredicate(index).is_null()
            && pg_sys::RelationGetIndexExpressions(index).is_null()
    }
}

impl Row {
    /// Whether an array of bigint without nulls has the value. Nothing is copied of one that
    /// is not compressed.
    pub fn array_has(&self, column: i16, value: i64) -> bool {
        let Some(array) = self.raw(column) else { return false };
        // SAFETY: not null, and such an array by the table's definition.
        unsafe { datum::bigint_array_has(array, value) }
    }
}
