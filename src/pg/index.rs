//! Index entries of direct inserts, and range reads.

use core::cell::Cell;
use core::ffi::c_int;
use core::ptr;

use pgrx::pg_sys;

use super::datum::Datum;
use super::heap::{ReadSlot, Row, Table};
use super::lock::LockMode;
use super::snapshot::{Held, Snapshot};
use super::{compat, memory};
use crate::error::{Error, Result};

/// All indexes of a table, open for insertion.
pub(super) struct Writers {
    indexes: Vec<IndexWriter>,
    /// Made only for an index that needs expressions to be evaluated.
    executor: Cell<*mut pg_sys::EState>,
    context: pg_sys::MemoryContext,
}

struct IndexWriter {
    relation: pg_sys::Relation,
    info: *mut pg_sys::IndexInfo,
    condition: Condition,
    columns: usize,
}

/// Which rows an index has entries for.
enum Condition {
    All,
    /// `WHERE column IS NOT NULL`, checked without the executor.
    NotNull(usize),
    /// Any other predicate, or expressions as columns.
    Evaluated,
}

impl Writers {
    /// `context` is the current one, and outlives them.
    pub(super) fn open(heap: pg_sys::Relation, context: pg_sys::MemoryContext) -> Self {
        let mut indexes = Vec::new();
        // SAFETY: an open relation; the list is a copy of the relation cache's.
        unsafe {
            let oids = pg_sys::RelationGetIndexList(heap);
            let count = if oids.is_null() { 0 } else { (*oids).length };
            for i in 0..count {
                let oid = (*(*oids).elements.add(i as usize)).oid_value;
                let relation = pg_sys::index_open(oid, LockMode::RowExclusive as i32);
                let info = pg_sys::BuildIndexInfo(relation);
                if !(*info).ii_ReadyForInserts {
                    // CREATE INDEX CONCURRENTLY has not come that far.
                    pg_sys::index_close(relation, LockMode::RowExclusive as i32);
                    continue;
                }
                indexes.push(IndexWriter {
                    relation,
                    info,
                    condition: Condition::of(info),
                    columns: usize::try_from((*info).ii_NumIndexAttrs).unwrap_or(0),
                });
            }
            pg_sys::list_free(oids);
        }
        Self { indexes, executor: Cell::new(ptr::null_mut()), context }
    }

    /// Makes the entries of rows that were just written; their tids are in the slots.
    /// What is evaluated on the way stays in the current memory context.
    pub(super) fn insert(
        &self,
        heap: pg_sys::Relation,
        slots: &[*mut pg_sys::TupleTableSlot],
    ) -> Result<()> {
        for index in &self.indexes {
            index.insert(heap, slots, self)?;
        }
        Ok(())
    }

    fn executor(&self) -> *mut pg_sys::EState {
        if self.executor.get().is_null() {
            // SAFETY: freed by `close`, or with the context it hangs on.
            let executor =
                memory::switched(self.context, || unsafe { pg_sys::CreateExecutorState() });
            self.executor.set(executor);
        }
        self.executor.get()
    }

    pub(super) fn close(self) {
        // SAFETY: opened by `open`.
        unsafe {
            for index in &self.indexes {
                compat::index_insert_cleanup(index.relation, index.info);
                pg_sys::index_close(index.relation, LockMode::RowExclusive as i32);
            }
            if !self.executor.get().is_null() {
                pg_sys::FreeExecutorState(self.executor.get());
            }
        }
    }
}

impl Condition {
    /// # Safety
    /// `info` comes from BuildIndexInfo.
    unsafe fn of(info: *mut pg_sys::IndexInfo) -> Self {
        // SAFETY: node pointers are tagged; each is looked at as what its tag says.
        unsafe {
            if !(*info).ii_Expressions.is_null() {
                return Self::Evaluated;
            }
            let predicate = (*info).ii_Predicate;
            if predicate.is_null() {
                return Self::All;
            }
            if (*predicate).length == 1 {
                let test: *mut pg_sys::NullTest = (*(*predicate).elements).ptr_value.cast();
                if (*test).xpr.type_ == pg_sys::NodeTag::T_NullTest
                    && (*test).nulltesttype == pg_sys::NullTestType::IS_NOT_NULL
                    && !(*test).argisrow
                {
                    let variable: *mut pg_sys::Var = (*test).arg.cast();
                    if (*variable).xpr.type_ == pg_sys::NodeTag::T_Var && (*variable).varattno > 0 {
                        return Self::NotNull((*variable).varattno as usize - 1);
                    }
                }
            }
            Self::Evaluated
        }
    }
}

impl IndexWriter {
    fn insert(
        &self,
        heap: pg_sys::Relation,
        slots: &[*mut pg_sys::TupleTableSlot],
        writers: &Writers,
    ) -> Result<()> {
        const WIDEST: usize = pg_sys::INDEX_MAX_KEYS as usize;
        let mut values = [Datum::null(); WIDEST];
        let mut nulls = [false; WIDEST];
        // SAFETY: `info` belongs to `relation`, whose heap is `heap`; the slots hold
        // rows of it with all columns deformed, since they are virtual.
        unsafe {
            let info = self.info;
            if !(*info).ii_ExclusionOps.is_null() {
                return Err(Error::internal(
                    "exclusion constraints on awa tables are not supported",
                ));
            }
            let unique = if (*info).ii_Unique {
                pg_sys::IndexUniqueCheck::UNIQUE_CHECK_YES
            } else {
                pg_sys::IndexUniqueCheck::UNIQUE_CHECK_NO
            };
            for &slot in slots {
                match self.condition {
                    Condition::NotNull(column) if *(*slot).tts_isnull.add(column) => continue,
                    Condition::All | Condition::NotNull(_) => {
                        for i in 0..self.columns.min(WIDEST) {
                            let column = (*info).ii_IndexAttrNumbers.get(i).copied().unwrap_or(0);
                            let Some(column) = usize::try_from(column).ok().filter(|c| *c > 0)
                            else {
                                return Err(Error::internal("index on a system column"));
                            };
                            if let (Some(value), Some(null)) = (values.get_mut(i), nulls.get_mut(i))
                            {
                                *value = *(*slot).tts_values.add(column - 1);
                                *null = *(*slot).tts_isnull.add(column - 1);
                            }
                        }
                    }
                    Condition::Evaluated => {
                        if !self.evaluate(slot, writers.executor(), &mut values, &mut nulls) {
                            continue;
                        }
                    }
                }
                pg_sys::index_insert(
                    self.relation,
                    values.as_mut_ptr(),
                    nulls.as_mut_ptr(),
                    ptr::addr_of_mut!((*slot).tts_tid),
                    heap,
                    unique,
                    false,
                    info,
                );
            }
        }
        Ok(())
    }

    /// The way of ExecInsertIndexTuples (execIndexing.c): false when the predicate
    /// leaves the row out.
    ///
    /// # Safety
    /// `slot` holds a row of the heap; the arrays have INDEX_MAX_KEYS places.
    unsafe fn evaluate(
        &self,
        slot: *mut pg_sys::TupleTableSlot,
        executor: *mut pg_sys::EState,
        values: &mut [Datum],
        nulls: &mut [bool],
    ) -> bool {
        // SAFETY: the caller vouches; the expression states live in the executor's
        // query context.
        unsafe {
            let mut econtext = (*executor).es_per_tuple_exprcontext;
            if econtext.is_null() {
                econtext = pg_sys::MakePerTupleExprContext(executor);
            }
            pg_sys::MemoryContextReset((*econtext).ecxt_per_tuple_memory);
            (*econtext).ecxt_scantuple = slot;
            if !(*self.info).ii_Predicate.is_null() {
                if (*self.info).ii_PredicateState.is_null() {
                    (*self.info).ii_PredicateState =
                        pg_sys::ExecPrepareQual((*self.info).ii_Predicate, executor);
                }
                if !pg_sys::ExecQual((*self.info).ii_PredicateState, econtext) {
                    return false;
                }
            }
            pg_sys::FormIndexDatum(
                self.info,
                slot,
                executor,
                values.as_mut_ptr(),
                nulls.as_mut_ptr(),
            );
            true
        }
    }
}

/// An open bigint B-tree and its scan.
pub struct IndexReader<'t> {
    table: &'t Table,
    index: pg_sys::Relation,
    scan: pg_sys::IndexScanDesc,
    slot: ReadSlot,
    _held: Held,
}

impl<'t> IndexReader<'t> {
    pub(super) fn open(table: &'t Table, index: u32, snapshot: Snapshot) -> Self {
        let held = Held::take(snapshot);
        // SAFETY: the table is open; the snapshot is held as long as the scan.
        unsafe {
            let index = pg_sys::index_open(index.into(), LockMode::AccessShare as i32);
            let scan = compat::index_beginscan(table.relation(), index, held.pointer(), 2);
            Self { table, index, scan, slot: ReadSlot::new(table.relation()), _held: held }
        }
    }

    /// Reads the rows with `lo <= column <= hi`, in that order, until `each` returns
    /// false.
    pub fn range(
        &mut self,
        lo: i64,
        hi: i64,
        mut each: impl FnMut(&Row) -> Result<bool>,
    ) -> Result<()> {
        // SAFETY: two keys on the first column, which is a bigint, as the scan was
        // opened for.
        unsafe {
            let mut keys: [pg_sys::ScanKeyData; 2] = core::mem::zeroed();
            let [from, to] = &mut keys;
            pg_sys::ScanKeyInit(
                from,
                1,
                pg_sys::BTGreaterEqualStrategyNumber as u16,
                pg_sys::F_INT8GE.into(),
                Datum::from(lo),
            );
            pg_sys::ScanKeyInit(
                to,
                1,
                pg_sys::BTLessEqualStrategyNumber as u16,
                pg_sys::F_INT8LE.into(),
                Datum::from(hi),
            );
            pg_sys::index_rescan(
                self.scan,
                keys.as_mut_ptr(),
                keys.len() as c_int,
                ptr::null_mut(),
                0,
            );
            let forward = pg_sys::ScanDirection::ForwardScanDirection;
            while pg_sys::index_getnext_slot(self.scan, forward, self.slot.slot) {
                if !each(&self.slot.row())? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Reads the rows whose first column, a text of collation C, is `key`,
    /// until `each` returns false. The reader was opened for two keys; one is enough here.
    pub fn equal_text(&mut self, key: &str, each: impl FnMut(&Row) -> Result<bool>) -> Result<()> {
        let value = super::datum::ToDatum::to_datum(key);
        let bounds = [pg_sys::F_TEXT_GE, pg_sys::F_TEXT_LE];
        // SAFETY: the column is a text of collation C, and so is the value.
        unsafe { self.equal(value, (pg_sys::TEXTOID, pg_sys::C_COLLATION_OID), bounds, each) }
    }

    /// Reads the rows whose first column, a uuid, is `key`, until `each` returns false.
    pub fn equal_uuid(
        &mut self,
        key: &super::datum::Uuid,
        each: impl FnMut(&Row) -> Result<bool>,
    ) -> Result<()> {
        let value = super::datum::ToDatum::to_datum(key);
        let bounds = [pg_sys::F_UUID_GE, pg_sys::F_UUID_LE];
        // SAFETY: the column is a uuid, and so is the value.
        unsafe { self.equal(value, (pg_sys::UUIDOID, pg_sys::InvalidOid), bounds, each) }
    }

    /// # Safety
    /// The first column and `value` have the type and collation, `bounds` are its >= and <=.
    unsafe fn equal(
        &mut self,
        value: Datum,
        (type_oid, collation): (pg_sys::Oid, pg_sys::Oid),
        [at_least, at_most]: [u32; 2],
        mut each: impl FnMut(&Row) -> Result<bool>,
    ) -> Result<()> {
        // SAFETY: the caller vouches for the keys, two of which the scan was opened for.
        unsafe {
            let mut keys: [pg_sys::ScanKeyData; 2] = core::mem::zeroed();
            for (key, strategy, function) in [
                (0, pg_sys::BTGreaterEqualStrategyNumber, at_least),
                (1, pg_sys::BTLessEqualStrategyNumber, at_most),
            ] {
                pg_sys::ScanKeyEntryInitialize(
                    &mut keys[key],
                    0,
                    1,
                    strategy as u16,
                    type_oid,
                    collation,
                    function.into(),
                    value,
                );
            }
            pg_sys::index_rescan(
                self.scan,
                keys.as_mut_ptr(),
                keys.len() as c_int,
                ptr::null_mut(),
                0,
            );
            let forward = pg_sys::ScanDirection::ForwardScanDirection;
            while pg_sys::index_getnext_slot(self.scan, forward, self.slot.slot) {
                if !each(&self.slot.row())? {
                    break;
                }
            }
        }
        Ok(())
    }

    pub fn table(&self) -> &Table {
        self.table
    }
}

impl Drop for IndexReader<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        // SAFETY: opened by `open`. The slot may still pin a page: it goes after us.
        unsafe {
            pg_sys::index_endscan(self.scan);
            pg_sys::index_close(self.index, LockMode::AccessShare as i32);
        }
    }
}
