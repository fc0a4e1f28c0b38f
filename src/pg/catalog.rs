//! The oids of the extension's objects, cached in the backend.
//!
//! The schema `awa` is a member of the extension, made and dropped with it, so the
//! system cache of schemas tells when the extension has changed: pg_extension itself
//! sends no invalidations. Only flags and cells are touched in the callbacks.

use core::cell::{Cell, RefCell};
use core::ffi::{CStr, c_int};
use core::ptr;
use std::collections::HashMap;
use std::ffi::CString;

use pgrx::pg_sys;

use super::datum::Datum;
use crate::error::{Error, Result, SqlState};

pub const SEGMENTS: u8 = 16;

const NAME: &CStr = c"awa";

/// The three leaves of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaf {
    Ready,
    Claims,
    Closures,
}

impl Leaf {
    const fn name(self) -> &'static str {
        match self {
            Self::Ready => "ready_entries",
            Self::Claims => "lease_claim_batches",
            Self::Closures => "lease_claim_closures",
        }
    }
}

/// The two indexes of a ready leaf.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeafIndex {
    Position,
    JobId,
}

#[derive(Clone, Copy)]
struct Extension {
    oid: u32,
    owner: u32,
    schema: u32,
    /// Its objects are those that this library was made for.
    is_ours: bool,
}

/// The version of the library; the extension has one of its own in each database.
const LIBRARY: &str = env!("CARGO_PKG_VERSION");

const KINDS: usize = 5;

struct Cache {
    is_registered: Cell<bool>,
    /// Cleared by an invalidation; what is below is read again then.
    is_current: Cell<bool>,
    extension: Cell<Option<Extension>>,
    /// What pg_extension says, where it is not the library's.
    version: RefCell<String>,
    /// Three leaves and two indexes of each segment; 0 is not known.
    leaves: [[Cell<u32>; SEGMENTS as usize]; KINDS],
    others: RefCell<HashMap<&'static str, u32>>,
}

thread_local! {
    static CACHE: Cache = Cache {
        is_registered: Cell::new(false),
        is_current: Cell::new(false),
        extension: Cell::new(None),
        version: RefCell::new(String::new()),
        leaves: [const { [const { Cell::new(0) }; SEGMENTS as usize] }; KINDS],
        others: RefCell::new(HashMap::new()),
    };
}

impl Cache {
    fn extension(&self) -> Option<Extension> {
        if !self.is_current.get() {
            self.reload();
        }
        self.extension.get()
    }

    fn reload(&self) {
        if !self.is_registered.replace(true) {
            // SAFETY: both callbacks only touch this cache. Registered once: the
            // server has room for few (inval.c).
            unsafe {
                pg_sys::CacheRegisterSyscacheCallback(
                    pg_sys::SysCacheIdentifier::NAMESPACEOID as c_int,
                    Some(on_schema_change),
                    Datum::null(),
                );
                pg_sys::CacheRegisterRelcacheCallback(Some(on_relation_change), Datum::null());
            }
        }
        // Before reading: an invalidation may arrive while we do.
        self.is_current.set(true);
        let (found, version) = read_extension().unzip();
        if found.map(|e| (e.oid, e.schema)) != self.extension.get().map(|e| (e.oid, e.schema)) {
            self.forget_relations();
        }
        self.extension.set(found);
        if found.is_some_and(|extension| !extension.is_ours) {
            // ALTER EXTENSION UPDATE need not touch the schema: looked at again next time.
            self.is_current.set(false);
            self.version.replace(version.unwrap_or_default());
        }
    }

    /// The extension, if it is there and fits this library.
    fn present(&self) -> Result<Extension> {
        match self.extension() {
            Some(extension) if extension.is_ours => Ok(extension),
            Some(_) => Err(mismatch(&self.version.borrow())),
            None => Err(absent()),
        }
    }

    fn forget_relations(&self) {
        self.leaves.iter().flatten().for_each(|oid| oid.set(0));
        match self.others.try_borrow_mut() {
            Ok(mut others) => others.clear(),
            Err(_) => self.is_current.set(false),
        }
    }

    fn forget(&self, relation: u32) {
        self.leaves.iter().flatten().filter(|oid| oid.get() == relation).for_each(|oid| oid.set(0));
        match self.others.try_borrow_mut() {
            Ok(mut others) => others.retain(|_, oid| *oid != relation),
            Err(_) => self.is_current.set(false),
        }
    }

    fn leaf(&self, kind: usize, segment: u8, name: impl FnOnce() -> String) -> Result<u32> {
        let extension = self.present()?;
        let Some(known) = self.leaves.get(kind).and_then(|kind| kind.get(usize::from(segment)))
        else {
            return Err(Error::internal(format!("segment {segment} is out of range")));
        };
        if known.get() == 0 {
            known.set(look_up(&name(), extension)?);
        }
        Ok(known.get())
    }
}

unsafe extern "C-unwind" fn on_schema_change(_: Datum, _: c_int, _: u32) {
    // The cache is gone when the process is past its thread's end.
    let _ = CACHE.try_with(|cache| cache.is_current.set(false));
}

unsafe extern "C-unwind" fn on_relation_change(_: Datum, relation: pg_sys::Oid) {
    let _ = CACHE.try_with(|cache| {
        if relation == pg_sys::InvalidOid {
            cache.forget_relations();
            cache.is_current.set(false);
        } else {
            cache.forget(relation.into());
        }
    });
}

/// The oid of the extension in this database.
pub fn extension_oid() -> Option<u32> {
    CACHE.with(Cache::extension).map(|extension| extension.oid)
}

/// What names this database's queues in shared memory: its oid and the extension's.
pub fn identity() -> Result<(u32, u32)> {
    let extension = CACHE.with(Cache::present)?;
    // SAFETY: backend-local.
    Ok((unsafe { pg_sys::MyDatabaseId }.into(), extension.oid))
}

/// Its owner, whom `spi::as_owner` becomes.
pub fn extension_owner() -> Result<u32> {
    CACHE.with(Cache::present).map(|extension| extension.owner)
}

/// A leaf of a segment.
pub fn leaf(leaf: Leaf, segment: u8) -> Result<u32> {
    CACHE.with(|cache| cache.leaf(leaf as usize, segment, || format!("{}_{segment}", leaf.name())))
}

/// An index of a segment's ready leaf.
pub fn leaf_index(index: LeafIndex, segment: u8) -> Result<u32> {
    let (kind, column) = match index {
        LeafIndex::Position => (3, "position"),
        LeafIndex::JobId => (4, "job_id"),
    };
    CACHE.with(|cache| cache.leaf(kind, segment, || format!("ready_entries_{segment}_{column}")))
}

/// Any other table, index or sequence of the schema, by name.
pub fn relation(name: &'static str) -> Result<u32> {
    CACHE.with(|cache| {
        let extension = cache.present()?;
        if let Some(oid) = cache.others.borrow().get(name) {
            return Ok(*oid);
        }
        let oid = look_up(name, extension)?;
        cache.others.borrow_mut().insert(name, oid);
        Ok(oid)
    })
}

/// Whether a table, an index, or anything else that shares their names has this one.
pub fn is_taken(name: &str) -> Result<bool> {
    let extension = CACHE.with(Cache::extension).ok_or_else(absent)?;
    let name = c_string(name)?;
    // SAFETY: looks in the system cache.
    let oid: u32 =
        unsafe { pg_sys::get_relname_relid(name.as_ptr(), extension.schema.into()) }.into();
    Ok(oid != 0)
}

/// Whether a relation has this name.
pub fn is_named(relation: u32, name: &str) -> bool {
    // SAFETY: a palloc'd name, or null for what is gone (lsyscache.c).
    unsafe {
        let found = pg_sys::get_rel_name(relation.into());
        !found.is_null() && CStr::from_ptr(found).to_bytes() == name.as_bytes()
    }
}

/// The enum type awa.job_state.
pub fn job_state_type() -> Result<u32> {
    let extension = CACHE.with(Cache::present)?;
    // SAFETY: looks in the system cache by name and schema.
    let oid: u32 = unsafe {
        pg_sys::GetSysCacheOid(
            pg_sys::SysCacheIdentifier::TYPENAMENSP as c_int,
            pg_sys::Anum_pg_type_oid as i16,
            Datum::from(c"job_state".as_ptr()),
            Datum::from(extension.schema),
            Datum::null(),
            Datum::null(),
        )
    }
    .into();
    if oid == 0 { Err(missing("type", "job_state")) } else { Ok(oid) }
}

/// A value of awa.job_state.
pub fn job_state(label: &str) -> Result<Datum> {
    let type_oid = job_state_type()?;
    let name = c_string(label)?;
    // SAFETY: looks in the system cache by type and label.
    let oid: u32 = unsafe {
        pg_sys::GetSysCacheOid(
            pg_sys::SysCacheIdentifier::ENUMTYPOIDNAME as c_int,
            pg_sys::Anum_pg_enum_oid as i16,
            Datum::from(type_oid),
            Datum::from(name.as_ptr()),
            Datum::null(),
            Datum::null(),
        )
    }
    .into();
    if oid == 0 { Err(missing("job state", label)) } else { Ok(Datum::from(oid)) }
}

/// The label of a value of awa.job_state (or of any enum).
pub fn enum_label(value: Datum) -> Option<String> {
    // SAFETY: a tuple of the system cache is a pg_enum row, released after use.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::ENUMOID as c_int, value);
        if tuple.is_null() {
            return None;
        }
        let row: pg_sys::Form_pg_enum = pg_sys::GETSTRUCT(tuple).cast();
        let label = CStr::from_ptr((*row).enumlabel.data.as_ptr()).to_string_lossy().into_owned();
        pg_sys::ReleaseSysCache(tuple);
        Some(label)
    }
}

fn read_extension() -> Option<(Extension, String)> {
    // SAFETY: a scan of pg_extension, which is a page; a row starts with its struct.
    let (oid, owner, version) = unsafe {
        let lock = pg_sys::AccessShareLock as c_int;
        let relation = pg_sys::table_open(pg_sys::ExtensionRelationId, lock);
        let scan = pg_sys::systable_beginscan(
            relation,
            pg_sys::InvalidOid,
            false,
            ptr::null_mut(),
            0,
            ptr::null_mut(),
        );
        let mut found = None;
        loop {
            let tuple = pg_sys::systable_getnext(scan);
            if tuple.is_null() {
                break;
            }
            let row: *mut pg_sys::FormData_pg_extension = pg_sys::GETSTRUCT(tuple).cast();
            if CStr::from_ptr((*row).extname.data.as_ptr()) == NAME {
                let version = version_of(tuple, (*relation).rd_att);
                found = Some(((*row).oid.into(), (*row).extowner.into(), version));
                break;
            }
        }
        pg_sys::systable_endscan(scan);
        pg_sys::table_close(relation, lock);
        found
    }?;
    // SAFETY: looks in the system cache.
    let schema: u32 = unsafe { pg_sys::get_namespace_oid(NAME.as_ptr(), true) }.into();
    let is_ours = version == LIBRARY;
    (schema != 0).then_some((Extension { oid, owner, schema, is_ours }, version))
}

/// # Safety
/// A row of pg_extension, and its descriptor.
unsafe fn version_of(tuple: pg_sys::HeapTuple, descriptor: pg_sys::TupleDesc) -> String {
    let column = pg_sys::Anum_pg_extension_extversion as c_int;
    let mut is_null = false;
    // SAFETY: the caller vouches for the row; the column is a text.
    unsafe {
        let version = pg_sys::heap_getattr(tuple, column, descriptor, &mut is_null);
        if is_null {
            return String::new();
        }
        let version = pg_sys::text_to_cstring(version.cast_mut_ptr());
        CStr::from_ptr(version).to_string_lossy().into_owned()
    }
}

/// 55000 where the library and the extension in this database are of two versions.
pub fn ensure_version() -> Result<()> {
    CACHE.with(Cache::present).map(|_| ())
}

fn mismatch(version: &str) -> Error {
    Error::new(
        SqlState::WRONG_STATE,
        format!("the library is awa {LIBRARY}, extension \"awa\" in this database is {version}"),
    )
    .hint("Run ALTER EXTENSION awa UPDATE, or install the library of that version.")
}

fn look_up(name: &str, extension: Extension) -> Result<u32> {
    let c_name = c_string(name)?;
    // SAFETY: looks in the system cache.
    let oid: u32 =
        unsafe { pg_sys::get_relname_relid(c_name.as_ptr(), extension.schema.into()) }.into();
    if oid == 0 { Err(missing("relation", name)) } else { Ok(oid) }
}

fn c_string(name: &str) -> Result<CString> {
    CString::new(name).map_err(|_| Error::invalid("name must not contain a null character"))
}

fn absent() -> Error {
    Error::new(SqlState::WRONG_STATE, "extension \"awa\" is not installed in this database")
        .hint("Run CREATE EXTENSION awa.")
}

fn missing(kind: &str, name: &str) -> Error {
    Error::new(SqlState::WRONG_STATE, format!("{kind} \"awa.{name}\" does not exist"))
        .hint("Run ALTER EXTENSION awa UPDATE.")
}
