//! Databases, and the extension in this one, as the catalogs have them now.

use core::ffi::{CStr, c_char, c_int};

use pgrx::pg_sys;

use super::compat;

/// `datconnlimit` of a database whose DROP was interrupted (pg_database.h).
const INVALID_DATABASE: i32 = -2;

pub struct Database {
    pub oid: u32,
    pub name: String,
    /// Neither a template, nor closed to connections, nor half dropped.
    pub is_open: bool,
}

/// All databases. Needs a transaction, and no connection to any of them: this is how
/// the autovacuum launcher reads them (get_database_list, autovacuum.c).
pub fn databases() -> Vec<Database> {
    let mut found = Vec::new();
    // SAFETY: pg_database can be opened without a database; the tuples are copied
    // before the scan moves on. An error leaves the cleaning to the transaction.
    unsafe {
        let lock = pg_sys::AccessShareLock as pg_sys::LOCKMODE;
        let relation = pg_sys::table_open(pg_sys::DatabaseRelationId, lock);
        let scan = pg_sys::table_beginscan_catalog(relation, 0, core::ptr::null_mut());
        loop {
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            let row: *const pg_sys::FormData_pg_database = pg_sys::GETSTRUCT(tuple).cast();
            found.push(Database {
                oid: (*row).oid.to_u32(),
                name: CStr::from_ptr((*row).datname.data.as_ptr()).to_string_lossy().into_owned(),
                is_open: !(*row).datistemplate
                    && (*row).datallowconn
                    && (*row).datconnlimit != INVALID_DATABASE,
            });
        }
        pg_sys::table_endscan(scan);
        pg_sys::table_close(relation, lock);
    }
    found
}

/// The extension's OID in this database, looked up, not cached: for deciding whether
/// it is (still) there.
pub fn extension() -> Option<u32> {
    // SAFETY: a catalog look-up in a transaction.
    oid(unsafe { pg_sys::get_extension_oid(c"awa".as_ptr(), true) })
}

/// Whether `extension` is ours. It may be on its way out, but must be visible.
pub fn is_ours(extension: u32) -> bool {
    // SAFETY: as above; the name, if any, is a palloc'd C string.
    unsafe {
        let name = pg_sys::get_extension_name(pg_sys::Oid::from(extension));
        !name.is_null() && CStr::from_ptr(name) == c"awa"
    }
}

/// Locks the extension against being dropped until the transaction ends. False:
/// somebody is dropping it.
pub fn try_lock_extension(extension: u32) -> bool {
    // SAFETY: takes a lock of the lock manager, or does not.
    unsafe {
        pg_sys::ConditionalLockDatabaseObject(
            pg_sys::ExtensionRelationId,
            pg_sys::Oid::from(extension),
            0,
            pg_sys::AccessShareLock as pg_sys::LOCKMODE,
        )
    }
}

pub fn database_exists(database: u32) -> bool {
    // SAFETY: a look-up in the catalog cache, released at once.
    unsafe {
        let key = pg_sys::Datum::from(pg_sys::Oid::from(database));
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::DATABASEOID as c_int, key);
        if tuple.is_null() {
            return false;
        }
        pg_sys::ReleaseSysCache(tuple);
        true
    }
}

/// # Safety
/// `name` is a C string.
pub(super) unsafe fn database_named(name: *const c_char) -> Option<u32> {
    // SAFETY: the caller vouches for the name.
    oid(unsafe { pg_sys::get_database_oid(name, true) })
}

/// Whether the current role owns the database (a superuser owns everything).
pub fn owns_database(database: u32) -> bool {
    compat::owns_database(pg_sys::Oid::from(database))
}

pub fn owns_extension(extension: u32) -> bool {
    compat::owns_extension(pg_sys::Oid::from(extension))
}

/// have_createdb_privilege (dbcommands.c), which is static.
pub fn may_create_database() -> bool {
    // SAFETY: a look-up in the catalog cache, released at once.
    unsafe {
        if pg_sys::superuser() {
            return true;
        }
        let key = pg_sys::Datum::from(pg_sys::GetUserId());
        let tuple = pg_sys::SearchSysCache1(pg_sys::SysCacheIdentifier::AUTHOID as c_int, key);
        if tuple.is_null() {
            return false;
        }
        let row: *const pg_sys::FormData_pg_authid = pg_sys::GETSTRUCT(tuple).cast();
        let may = (*row).rolcreatedb;
        pg_sys::ReleaseSysCache(tuple);
        may
    }
}

pub fn name_of(database: u32) -> Option<String> {
    // SAFETY: a look-up in the catalog cache; the name, if any, is a palloc'd C string.
    unsafe {
        let name = pg_sys::get_database_name(pg_sys::Oid::from(database));
        (!name.is_null()).then(|| CStr::from_ptr(name).to_string_lossy().into_owned())
    }
}

/// What initdb gave this cluster: a standby has that of its primary, an upgraded one its own.
pub fn system_identifier() -> i64 {
    // SAFETY: reads shared memory that does not change (xlog.c). All 64 bits count.
    unsafe { pg_sys::GetSystemIdentifier() }.cast_signed()
}

/// The database of this session; 0 without one.
pub fn this_database() -> u32 {
    // SAFETY: a plain variable of the backend.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

fn oid(oid: pg_sys::Oid) -> Option<u32> {
    (oid != pg_sys::InvalidOid).then(|| oid.to_u32())
}
