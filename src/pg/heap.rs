//! Direct access to our own tables: no SPI, no names to resolve, no triggers and no
//! privilege checks, which are the business of the caller.

use core::cell::RefCell;
use core::ffi::c_int;
use core::ptr;

use pgrx::pg_sys;

use super::datum::{self, Datum, Element, FromDatum};
use super::index::{IndexReader, Writers};
use super::lock::{self, LockMode};
use super::snapshot::{Held, Snapshot};
use super::{compat, memory};
use crate::error::{Error, Result};

/// Rows that are written in one go: bounds the memory of a batch.
const BATCH: usize = 512;

/// Where a row is: block and line pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tid {
    pub block: u32,
    pub offset: u16,
}

/// An open table. Dropped, it keeps its lock to the end of the transaction.
pub struct Table {
    relation: pg_sys::Relation,
    mode: LockMode,
    writer: RefCell<Option<Writer>>,
}

/// What inserting needs, made at the first insert and freed with the table.
struct Writer {
    context: pg_sys::MemoryContext,
    descriptor: pg_sys::TupleDesc,
    not_null: Vec<bool>,
    slots: Vec<*mut pg_sys::TupleTableSlot>,
    indexes: Writers,
}

impl Table {
    /// Opens and locks; raises where there is no such table.
    pub fn open(oid: u32, mode: LockMode) -> Self {
        // SAFETY: raises for what is not a table.
        let relation = unsafe { pg_sys::table_open(oid.into(), mode as i32) };
        Self::over(relation, mode)
    }

    /// None if the lock would have to be waited for, or the table is gone.
    pub fn try_open_conditional(oid: u32, mode: LockMode) -> Option<Self> {
        if !lock::lock_conditional(oid, mode) {
            return None;
        }
        // SAFETY: the lock is held; returns null for what is gone.
        let relation = unsafe { pg_sys::try_relation_open(oid.into(), 0) };
        if relation.is_null() {
            lock::unlock(oid, mode);
            return None;
        }
        Some(Self::over(relation, mode))
    }

    /// What is below knows the heap's tuples and none of another access method.
    fn over(relation: pg_sys::Relation, mode: LockMode) -> Self {
        // SAFETY: open.
        let is_heap = unsafe { ptr::eq((*relation).rd_tableam, pg_sys::GetHeapamTableAmRoutine()) };
        assert!(is_heap, "awa tables must use the heap access method");
        Self { relation, mode, writer: RefCell::new(None) }
    }

    pub fn close_keep_lock(self) {}

    /// Gives the lock back at once.
    pub fn close_release_lock(self) {
        let (oid, mode) = (self.oid(), self.mode);
        drop(self);
        lock::unlock(oid, mode);
    }

    pub fn oid(&self) -> u32 {
        // SAFETY: open.
        unsafe { (*self.relation).rd_id }.into()
    }

    /// Blocks of the main fork.
    pub fn blocks(&self) -> u32 {
        // SAFETY: open.
        unsafe {
            pg_sys::RelationGetNumberOfBlocksInFork(self.relation, pg_sys::ForkNumber::MAIN_FORKNUM)
        }
    }

    fn columns(&self) -> usize {
        // SAFETY: open.
        usize::try_from(unsafe { (*(*self.relation).rd_att).natts }).unwrap_or(0)
    }

    fn with_writer<T>(&self, body: impl FnOnce(&mut Writer) -> Result<T>) -> Result<T> {
        let mut writer = self.writer.borrow_mut();
        if writer.is_none() {
            *writer = Some(Writer::new(self.relation, self.columns()));
        }
        match writer.as_mut() {
            Some(writer) => body(writer),
            None => Err(Error::internal("table has no writer")),
        }
    }

    /// Writes one row and its index entries.
    pub fn insert(&self, row: &[Option<Datum>]) -> Result<Tid> {
        self.with_writer(|writer| {
            let slot = writer.slot(0);
            writer.fill(slot, row)?;
            // SAFETY: a filled slot of this relation. The row gets the current command's
            // id, and its tid is left in the slot. What is allocated on the way is freed
            // on the way (heapam_tuple_insert).
            unsafe {
                pg_sys::table_tuple_insert(
                    self.relation,
                    slot,
                    pg_sys::GetCurrentCommandId(true),
                    0,
                    ptr::null_mut(),
                );
            }
            writer.indexes.insert(self.relation, &[slot])?;
            // SAFETY: as above.
            let tid = unsafe { tid_of(slot) };
            writer.clear(1);
            Ok(tid)
        })
    }

    /// Writes rows a page at a time (one WAL record a page) and their index entries.
    /// Returns their places in order.
    pub fn insert_many<'r>(
        &self,
        rows: impl IntoIterator<Item = &'r [Option<Datum>]>,
    ) -> Result<Vec<Tid>> {
        let mut rows = rows.into_iter().peekable();
        let mut tids = Vec::with_capacity(rows.size_hint().0);
        self.with_writer(|writer| {
            let mut scratch = memory::Scratch::new();
            while rows.peek().is_some() {
                let mut count = 0;
                for row in rows.by_ref().take(BATCH) {
                    let slot = writer.slot(count);
                    writer.fill(slot, row)?;
                    count += 1;
                }
                scratch.run(|| {
                    let slots = writer.slots.get_mut(..count).unwrap_or_default();
                    // SAFETY: filled slots of this relation; heap_multi_insert keeps
                    // its copies in the current context and leaves the tids in them.
                    unsafe {
                        pg_sys::heap_multi_insert(
                            self.relation,
                            slots.as_mut_ptr(),
                            count as c_int,
                            pg_sys::GetCurrentCommandId(true),
                            0,
                            ptr::null_mut(),
                        );
                    }
                    writer.indexes.insert(self.relation, slots)?;
                    // SAFETY: as above.
                    tids.extend(slots.iter().map(|&slot| unsafe { tid_of(slot) }));
                    writer.clear(count);
                    Ok(())
                })?;
            }
            Ok(())
        })?;
        Ok(tids)
    }

    /// Deletes a row that no other transaction can be deleting; raises if one is.
    pub fn delete(&self, tid: Tid) {
        // A row that this command wrote is not there for it yet (heap_delete).
        super::xact::command_counter_increment();
        let mut pointer = pg_sys::ItemPointerData {
            ip_blkid: pg_sys::BlockIdData {
                bi_hi: (tid.block >> 16) as u16,
                bi_lo: tid.block as u16,
            },
            ip_posid: tid.offset,
        };
        // SAFETY: an open relation, and the place of a row in it.
        unsafe { pg_sys::simple_heap_delete(self.relation, &mut pointer) }
    }

    /// Reads the table in the order of its blocks until `each` returns false.
    pub fn scan(
        &self,
        snapshot: Snapshot,
        mut each: impl FnMut(&Row) -> Result<bool>,
    ) -> Result<()> {
        let held = Held::take(snapshot);
        let slot = ReadSlot::new(self.relation);
        // SAFETY: an open relation and a snapshot held longer than the scan. A
        // synchronized scan would start in the middle, and order matters to us.
        unsafe {
            let scan = pg_sys::table_beginscan_strat(
                self.relation,
                held.pointer(),
                0,
                ptr::null_mut(),
                true,
                false,
            );
            let forward = pg_sys::ScanDirection::ForwardScanDirection;
            let mut result = Ok(true);
            while matches!(result, Ok(true))
                && pg_sys::table_scan_getnextslot(scan, forward, slot.slot)
            {
                result = each(&slot.row());
            }
            pg_sys::table_endscan(scan);
            result.map(|_| ())
        }
    }

    /// A reader of the bigint B-tree `index` of this table, for any number of ranges.
    pub fn index(&self, index: u32, snapshot: Snapshot) -> IndexReader<'_> {
        IndexReader::open(self, index, snapshot)
    }

    /// Reads the rows with `lo <= column <= hi`, in that order, until `each` returns
    /// false. `index` is a B-tree of this table that starts with a bigint.
    pub fn index_range(
        &self,
        index: u32,
        lo: i64,
        hi: i64,
        snapshot: Snapshot,
        each: impl FnMut(&Row) -> Result<bool>,
    ) -> Result<()> {
        self.index(index, snapshot).range(lo, hi, each)
    }

    /// Reads the rows whose first index column, a text of collation C, is
    /// `key`, until `each` returns false.
    pub fn index_text(
        &self,
        index: u32,
        key: &str,
        snapshot: Snapshot,
        each: impl FnMut(&Row) -> Result<bool>,
    ) -> Result<()> {
        self.index(index, snapshot).equal_text(key, each)
    }

    /// Reads the rows whose first index column, a uuid, is `key`, until `each` returns false.
    pub fn index_uuid(
        &self,
        index: u32,
        key: &datum::Uuid,
        snapshot: Snapshot,
        each: impl FnMut(&Row) -> Result<bool>,
    ) -> Result<()> {
        self.index(index, snapshot).equal_uuid(key, each)
    }

    pub(super) fn relation(&self) -> pg_sys::Relation {
        self.relation
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        // The end of a failed transaction closes what was open.
        if std::thread::panicking() {
            return;
        }
        if let Some(writer) = self.writer.get_mut().take() {
            writer.close();
        }
        // SAFETY: open, and closed once.
        unsafe { pg_sys::table_close(self.relation, 0) }
    }
}

impl Writer {
    fn new(relation: pg_sys::Relation, columns: usize) -> Self {
        let context = memory::create();
        memory::switched(context, || {
            // SAFETY: an open relation. The copied descriptor has no reference count,
            // so a slot over it costs the resource owner nothing.
            let descriptor = unsafe { pg_sys::CreateTupleDescCopy((*relation).rd_att) };
            // CreateTupleDescCopy drops the constraints: ask the original.
            let not_null = (0..columns)
                // SAFETY: within the columns of the relation.
                .map(|i| unsafe { compat::is_not_null((*relation).rd_att, i) })
                .collect();
            let indexes = Writers::open(relation, context);
            Self { context, descriptor, not_null, slots: Vec::new(), indexes }
        })
    }

    fn slot(&mut self, i: usize) -> *mut pg_sys::TupleTableSlot {
        while self.slots.len() <= i {
            // SAFETY: lives in our context, like the descriptor it points to.
            let slot = memory::switched(self.context, || unsafe {
                pg_sys::MakeSingleTupleTableSlot(
                    self.descriptor,
                    ptr::addr_of!(pg_sys::TTSOpsVirtual),
                )
            });
            self.slots.push(slot);
        }
        self.slots.get(i).copied().unwrap_or(ptr::null_mut())
    }

    /// Puts a row into a slot by reference. A NULL where the table has none is
    /// refused here, as nobody after us looks.
    fn fill(&self, slot: *mut pg_sys::TupleTableSlot, row: &[Option<Datum>]) -> Result<()> {
        let columns = self.not_null.len();
        if row.len() != columns {
            let given = row.len();
            return Err(Error::internal(format!("table has {columns} columns, row has {given}")));
        }
        if row.iter().zip(&self.not_null).any(|(value, &not_null)| not_null && value.is_none()) {
            return Err(Error::internal("null value in a column that has none"));
        }
        // SAFETY: the slot has `columns` values and flags.
        unsafe {
            pg_sys::ExecClearTuple(slot);
            for (i, value) in row.iter().enumerate() {
                *(*slot).tts_values.add(i) = value.unwrap_or(Datum::null());
                *(*slot).tts_isnull.add(i) = value.is_none();
            }
            pg_sys::ExecStoreVirtualTuple(slot);
        }
        Ok(())
    }

    /// The slots forget values that are about to go.
    fn clear(&self, count: usize) {
        for &slot in self.slots.iter().take(count) {
            // SAFETY: a slot of ours.
            unsafe { pg_sys::ExecClearTuple(slot) };
        }
    }

    fn close(self) {
        self.indexes.close();
        memory::delete(self.context);
    }
}

/// # Safety
/// `slot` is live.
unsafe fn tid_of(slot: *mut pg_sys::TupleTableSlot) -> Tid {
    // SAFETY: the caller vouches.
    let tid = unsafe { (*slot).tts_tid };
    Tid {
        block: (u32::from(tid.ip_blkid.bi_hi) << 16) | u32::from(tid.ip_blkid.bi_lo),
        offset: tid.ip_posid,
    }
}

/// A slot that scans store their rows in.
pub(super) struct ReadSlot {
    pub(super) slot: *mut pg_sys::TupleTableSlot,
}

impl ReadSlot {
    pub(super) fn new(relation: pg_sys::Relation) -> Self {
        // SAFETY: an open relation.
        let slot = unsafe {
            pg_sys::MakeSingleTupleTableSlot(
                (*relation).rd_att,
                pg_sys::table_slot_callbacks(relation),
            )
        };
        Self { slot }
    }

    pub(super) fn row(&self) -> Row {
        Row { slot: self.slot }
    }
}

impl Drop for ReadSlot {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: ours; drops its pins.
            unsafe { pg_sys::ExecDropSingleTupleTableSlot(self.slot) }
        }
    }
}

/// Whether the transaction that wrote a row committed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Committed,
    Aborted,
    /// Or prepared; also our own.
    InProgress(u32),
}

/// The row a scan is at. Columns are counted from 1, as in the catalogs, and are
/// trusted to have the type they are asked for.
pub struct Row {
    slot: *mut pg_sys::TupleTableSlot,
}

impl Row {
    /// The datum in place: gone when the scan moves on. For passing through at once.
    pub fn raw(&self, column: i16) -> Option<Datum> {
        // SAFETY: the slot holds a row; columns it does not have are refused.
        unsafe {
            let slot = self.slot;
            if column < 1 || i32::from(column) > (*(*slot).tts_tupleDescriptor).natts {
                return None;
            }
            if (*slot).tts_nvalid < column {
                pg_sys::slot_getsomeattrs_int(slot, c_int::from(column));
            }
            let i = column as usize - 1;
            (!*(*slot).tts_isnull.add(i)).then(|| *(*slot).tts_values.add(i))
        }
    }

    fn get<T: FromDatum>(&self, column: i16) -> Option<T> {
        // SAFETY: not null, and of the type that the table's definition promises.
        self.raw(column).map(|datum| unsafe { T::from_datum(datum) })
    }

    pub fn is_null(&self, column: i16) -> bool {
        self.raw(column).is_none()
    }

    pub fn i16(&self, column: i16) -> Option<i16> {
        self.get(column)
    }

    pub fn i32(&self, column: i16) -> Option<i32> {
        self.get(column)
    }

    pub fn i64(&self, column: i16) -> Option<i64> {
        self.get(column)
    }

    pub fn bool(&self, column: i16) -> Option<bool> {
        self.get(column)
    }

    /// A "char".
    pub fn char(&self, column: i16) -> Option<u8> {
        self.get(column).map(|datum::Char(byte)| byte)
    }

    pub fn oid(&self, column: i16) -> Option<u32> {
        self.get(column)
    }

    pub fn text(&self, column: i16) -> Option<String> {
        self.get(column)
    }

    pub fn timestamp(&self, column: i16) -> Option<datum::Timestamp> {
        self.get(column)
    }

    pub fn interval(&self, column: i16) -> Option<datum::Interval> {
        self.get(column)
    }

    pub fn uuid(&self, column: i16) -> Option<datum::Uuid> {
        self.get(column)
    }

    pub fn bytea(&self, column: i16) -> Option<Vec<u8>> {
        self.get(column)
    }

    pub fn bits8(&self, column: i16) -> Option<datum::Bits8> {
        self.get(column)
    }

    pub fn json(&self, column: i16) -> Option<serde_json::Value> {
        self.get(column)
    }

    /// A timestamptz, in microseconds.
    pub fn micros(&self, column: i16) -> Option<i64> {
        self.timestamp(column).map(|at| at.0)
    }

    /// The text of a jsonb.
    pub fn json_text(&self, column: i16) -> Option<String> {
        // SAFETY: not null, and a jsonb by the table's definition.
        self.raw(column).map(|datum| unsafe { datum::json_text(datum) })
    }

    pub fn enum_label(&self, column: i16) -> Option<String> {
        self.raw(column).and_then(super::catalog::enum_label)
    }

    pub fn i16_array(&self, column: i16) -> Result<Option<Vec<i16>>> {
        self.array(column, Element::INT2)
    }

    pub fn i64_array(&self, column: i16) -> Result<Option<Vec<i64>>> {
        self.array(column, Element::INT8)
    }

    pub fn timestamp_array(&self, column: i16) -> Result<Option<Vec<datum::Timestamp>>> {
        self.array(column, Element::TIMESTAMPTZ)
    }

    pub fn text_array(&self, column: i16) -> Result<Option<Vec<String>>> {
        self.array(column, Element::TEXT)
    }

    /// NULL elements are left out: our tables have none.
    fn array<T: FromDatum>(&self, column: i16, element: Element) -> Result<Option<Vec<T>>> {
        let Some(array) = self.raw(column) else { return Ok(None) };
        // SAFETY: not null, and such an array by the table's definition.
        let elements = unsafe { datum::elements(array, element) }?;
        // SAFETY: as above.
        Ok(Some(elements.into_iter().flatten().map(|e| unsafe { T::from_datum(e) }).collect()))
    }

    /// A varlena (text, bytea, jsonb, an array, bits), flat and copied into the
    /// current memory context.
    pub fn copied_varlena(&self, column: i16) -> Option<Datum> {
        // SAFETY: not null, and a varlena by the table's definition.
        self.raw(column).map(|datum| unsafe { datum::copy_varlena(datum) })
    }

    pub fn tid(&self) -> Tid {
        // SAFETY: the slot holds a row.
        unsafe { tid_of(self.slot) }
    }

    fn header(&self) -> pg_sys::HeapTupleHeader {
        // SAFETY: scans of a heap store into a buffer slot, which starts with a heap
        // slot (table_slot_callbacks gave it); the buffer is pinned.
        unsafe { (*(*self.slot.cast::<pg_sys::HeapTupleTableSlot>()).tuple).t_data }
    }

    /// The transaction that wrote the row; 2 when it is frozen.
    pub fn xmin(&self) -> u32 {
        // SAFETY: a pinned tuple's header (HeapTupleHeaderGetXmin, htup_details.h).
        unsafe {
            let header = self.header();
            let mask = u32::from((*header).t_infomask);
            if mask & pg_sys::HEAP_XMIN_FROZEN == pg_sys::HEAP_XMIN_FROZEN {
                return pg_sys::TransactionId::FROZEN.into_inner();
            }
            (*header).t_choice.t_heap.t_xmin.into_inner()
        }
    }

    /// What became of the row's writer, for scans with `Snapshot::Any`.
    pub fn fate(&self) -> Fate {
        // SAFETY: a pinned tuple's header.
        let mask = u32::from(unsafe { (*self.header()).t_infomask });
        if mask & pg_sys::HEAP_XMIN_COMMITTED != 0 {
            return Fate::Committed;
        }
        if mask & pg_sys::HEAP_XMIN_INVALID != 0 {
            return Fate::Aborted;
        }
        let xmin = self.xmin();
        if super::xact::is_in_progress(xmin) {
            Fate::InProgress(xmin)
        } else if super::xact::did_commit(xmin) {
            Fate::Committed
        } else {
            Fate::Aborted
        }
    }

    /// Whether an open transaction of somebody else has deleted or replaced the row.
    pub fn is_held(&self) -> bool {
        matches!(self.deleter(), Some(Fate::InProgress(xid)) if !super::xact::is_current(xid))
    }

    /// Whether a committed transaction deleted or replaced the row.
    pub fn is_deleted(&self) -> bool {
        self.deleter().is_some_and(|fate| fate == Fate::Committed)
    }

    /// What became of the transaction that deleted or replaced the row, if one tried to.
    pub fn deleter(&self) -> Option<Fate> {
        // SAFETY: a pinned tuple's header (HeapTupleHeaderGetUpdateXid).
        unsafe {
            let header = self.header();
            let mask = u32::from((*header).t_infomask);
            if mask & pg_sys::HEAP_XMAX_INVALID != 0 || mask & pg_sys::HEAP_XMAX_LOCK_ONLY != 0 {
                return None;
            }
            let is_multi = mask & pg_sys::HEAP_XMAX_IS_MULTI != 0;
            if !is_multi && mask & pg_sys::HEAP_XMAX_COMMITTED != 0 {
                return Some(Fate::Committed);
            }
            let xmax = if is_multi {
                pg_sys::HeapTupleGetUpdateXid(header)
            } else {
                (*header).t_choice.t_heap.t_xmax
            };
            let xmax = xmax.into_inner();
            if xmax == 0 {
                None
            } else if super::xact::is_in_progress(xmax) {
                Some(Fate::InProgress(xmax))
            } else if super::xact::did_commit(xmax) {
                Some(Fate::Committed)
            } else {
                Some(Fate::Aborted)
            }
        }
    }
}

/// The TOAST table of a table, if it has one.
pub fn toast_oid(oid: u32) -> Option<u32> {
    // SAFETY: a tuple of the system cache is a pg_class row, released after use.
    unsafe {
        let tuple =
            pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::RELOID as c_int, Datum::from(oid));
        if tuple.is_null() {
            return None;
        }
        let class: pg_sys::Form_pg_class = pg_sys::GETSTRUCT(tuple).cast();
        let toast: u32 = (*class).reltoastrelid.into();
        pg_sys::ReleaseSysCache(tuple);
        (toast != 0).then_some(toast)
    }
}

/// Blocks of a table's or TOAST table's main fork.
pub fn relation_size_blocks(oid: u32) -> u32 {
    // SAFETY: raises where there is no such relation.
    unsafe {
        let relation = pg_sys::relation_open(oid.into(), LockMode::AccessShare as i32);
        let blocks =
            pg_sys::RelationGetNumberOfBlocksInFork(relation, pg_sys::ForkNumber::MAIN_FORKNUM);
        pg_sys::relation_close(relation, LockMode::AccessShare as i32);
        blocks
    }
}

/// Empties tables, with their TOAST tables and indexes, at commit. The caller holds
/// the exclusive locks. Not for tables that foreign keys point to.
pub fn truncate(oids: &[u32]) {
    // SAFETY: the body of TRUNCATE (tablecmds.c) on plain tables that are locked, open
    // and not in use by this session; as there, we close what we opened.
    unsafe {
        let mut relations = ptr::null_mut();
        let mut relids = ptr::null_mut();
        let mut open = Vec::with_capacity(oids.len());
        for &oid in oids {
            let relation = pg_sys::table_open(oid.into(), LockMode::AccessExclusive as i32);
            pg_sys::CheckTableNotInUse(relation, c"TRUNCATE".as_ptr());
            relations = pg_sys::lappend(relations, relation.cast());
            relids = pg_sys::lappend_oid(relids, oid.into());
            open.push(relation);
        }
        compat::truncate(relations, relids);
        for relation in open {
            pg_sys::table_close(relation, 0);
        }
    }
}
