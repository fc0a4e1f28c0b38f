//! SQL, for everything that is not on the hot path.

use core::cell::{Cell, RefCell};
use core::ffi::{CStr, c_int};
use std::collections::HashMap;
use std::ffi::CString;

use pgrx::pg_sys::{self, Oid};

use super::datum::{self, Datum, FromDatum, Interval, Json, Timestamp, ToDatum, Uuid};
use super::{catalog, memory};
use crate::error::{Error, Result};

/// Runs `body` as the extension's owner, with a search path that no other role can
/// put objects in. Both hold around prepare and execute: a kept plan is analysed again
/// under the path of the moment, and one unqualified `=` would be enough to run an
/// attacker's operator.
///
/// An ERROR in between is undone by the abort of the transaction or subtransaction it
/// ends: role, settings and SPI connection (AbortTransaction, AbortSubTransaction).
pub fn as_owner<T>(body: impl FnOnce(&Spi) -> Result<T>) -> Result<T> {
    let owner = catalog::extension_owner()?;
    // SAFETY: backend-local.
    let caller = unsafe { pg_sys::CurrentMemoryContext };
    let role = Role::switch_to(owner);
    let settings = Settings::open();
    settings.set(c"search_path", c"pg_catalog, pg_temp");
    settings.set(c"jit", c"off");
    // A plan is made when our tables are small or never analyzed, and kept when they are large.
    // All that is done often has an index, whatever the caller thinks of indexes.
    settings.set(c"enable_seqscan", c"off");
    settings.set(c"enable_indexscan", c"on");
    settings.set(c"enable_bitmapscan", c"on");
    // SAFETY: finished below; on an ERROR by the abort.
    let connected = unsafe { pg_sys::SPI_connect() };
    let result = check(connected).and_then(|_| {
        let result = body(&Spi { caller });
        // SAFETY: connected above. Goes back to the caller's memory context.
        check(unsafe { pg_sys::SPI_finish() }).and(result)
    });
    settings.close();
    drop(role);
    result
}

/// Runs `body` with another lock_timeout. To be called in a subtransaction of its own, whose
/// rollback puts the setting back should `body` fail.
pub fn with_lock_timeout<T>(
    timeout: core::time::Duration,
    body: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let value = CString::new(timeout.as_millis().to_string())
        .map_err(|_| Error::internal("a number contains a null character"))?;
    let settings = Settings::open();
    settings.set(c"lock_timeout", &value);
    let value = body()?;
    settings.close();
    Ok(value)
}

thread_local! {
    /// How many `as_owner` are running.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Whether the statement that runs is one of ours, for triggers that look for others.
pub fn is_own() -> bool {
    DEPTH.get() > 0
}

/// Marks what `body` does to our tables as our own, where it needs no other role.
pub fn as_ours<T>(body: impl FnOnce() -> T) -> T {
    struct Ours;
    impl Drop for Ours {
        fn drop(&mut self) {
            DEPTH.set(DEPTH.get().saturating_sub(1));
        }
    }
    DEPTH.set(DEPTH.get() + 1);
    let _ours = Ours;
    body()
}

/// The role as it was. Put back even while panicking: two assignments, and nothing
/// must run with the owner's privileges on the way out.
struct Role {
    user: Oid,
    context: c_int,
}

impl Role {
    fn switch_to(owner: u32) -> Self {
        DEPTH.set(DEPTH.get() + 1);
        let mut role = Self { user: pg_sys::InvalidOid, context: 0 };
        // SAFETY: backend-local. The flag refuses SET ROLE and the like meanwhile.
        unsafe {
            pg_sys::GetUserIdAndSecContext(&mut role.user, &mut role.context);
            pg_sys::SetUserIdAndSecContext(
                owner.into(),
                role.context | pg_sys::SECURITY_LOCAL_USERID_CHANGE as c_int,
            );
        }
        role
    }
}

impl Drop for Role {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get().saturating_sub(1));
        // SAFETY: what GetUserIdAndSecContext gave.
        unsafe { pg_sys::SetUserIdAndSecContext(self.user, self.context) }
    }
}

/// Settings changed for a while (fmgr_security_definer does the same).
struct Settings {
    level: c_int,
}

impl Settings {
    fn open() -> Self {
        // SAFETY: closed by `close`, or by the abort.
        Self { level: unsafe { pg_sys::NewGUCNestLevel() } }
    }

    fn set(&self, name: &CStr, value: &CStr) {
        // SAFETY: a user-settable setting, kept until the nest level ends.
        unsafe {
            pg_sys::set_config_option(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_USERSET,
                pg_sys::GucSource::PGC_S_SESSION,
                pg_sys::GucAction::GUC_ACTION_SAVE,
                true,
                0,
                false,
            );
        }
    }

    fn close(self) {
        // SAFETY: ends the level that `open` began.
        unsafe { pg_sys::AtEOXact_GUC(true, self.level) }
    }
}

/// A type an argument can have.
pub trait SqlType: ToDatum {
    const OID: Oid;
}

macro_rules! sql_type {
    ($($type:ty => $oid:ident),* $(,)?) => { $(
        impl SqlType for $type {
            const OID: Oid = pg_sys::$oid;
        }
    )* };
}
sql_type! {
    bool => BOOLOID,
    i16 => INT2OID,
    i32 => INT4OID,
    i64 => INT8OID,
    f64 => FLOAT8OID,
    str => TEXTOID,
    String => TEXTOID,
    Timestamp => TIMESTAMPTZOID,
    Interval => INTERVALOID,
    Uuid => UUIDOID,
    [u8] => BYTEAOID,
    Json<'_> => JSONBOID,
    serde_json::Value => JSONBOID,
}

impl<T: SqlType + ?Sized> SqlType for &T {
    const OID: Oid = T::OID;
}

/// A bound value. Enums are passed as text and cast in the statement, since their oid
/// changes when the extension is made anew.
#[derive(Clone, Copy)]
pub struct Arg {
    oid: Oid,
    value: Option<Datum>,
}

impl Arg {
    pub fn of<T: SqlType>(value: T) -> Self {
        Self { oid: T::OID, value: Some(value.to_datum()) }
    }

    /// NULL for None.
    pub fn opt<T: SqlType>(value: Option<T>) -> Self {
        Self { oid: T::OID, value: value.map(|value| value.to_datum()) }
    }

    /// A jsonb that is passed through.
    pub fn jsonb(value: Option<Datum>) -> Self {
        Self { oid: pg_sys::JSONBOID, value }
    }

    pub fn bytea(bytes: &[u8]) -> Self {
        Self { oid: pg_sys::BYTEAOID, value: Some(bytes.to_datum()) }
    }

    /// An array made by one of `datum`'s functions.
    pub fn bigint_array(values: &[i64]) -> Self {
        Self { oid: pg_sys::INT8ARRAYOID, value: Some(datum::bigint_array(values)) }
    }

    pub fn text_array<S: AsRef<str>>(values: &[S]) -> Self {
        Self { oid: pg_sys::TEXTARRAYOID, value: Some(datum::text_array(values)) }
    }

    /// A value of any other type.
    pub fn raw(oid: Oid, value: Option<Datum>) -> Self {
        Self { oid, value }
    }
}

/// A connection, good inside `as_owner`.
pub struct Spi {
    caller: pg_sys::MemoryContext,
}

struct Plan {
    plan: pg_sys::SPIPlanPtr,
    types: Vec<Oid>,
}

thread_local! {
    /// Kept plans by the address of their text, which is a constant of ours. The
    /// server plans anew what an invalidation has hit.
    static PLANS: RefCell<HashMap<(usize, usize), Plan>> = RefCell::new(HashMap::new());
}

impl Spi {
    /// Runs a statement and returns how many rows it touched.
    pub fn execute(&self, sql: &'static str, args: &[Arg]) -> Result<u64> {
        self.run(sql, args, 0)?;
        // SAFETY: set by the run; its rows, if any, are not wanted.
        unsafe {
            let processed = pg_sys::SPI_processed;
            pg_sys::SPI_freetuptable(pg_sys::SPI_tuptable);
            Ok(processed)
        }
    }

    /// Runs a command whose text is put together at run time, its names quoted by
    /// `role::quoted`.
    pub fn command(&self, sql: &str) -> Result<()> {
        let text = CString::new(datum::to_server(sql))
            .map_err(|_| Error::internal("command contains a null character"))?;
        // SAFETY: a NUL-terminated text.
        check(unsafe { pg_sys::SPI_execute(text.as_ptr(), false, 0) })
    }

    /// Runs a statement and returns its rows.
    pub fn query(&self, sql: &'static str, args: &[Arg]) -> Result<Rows<'_>> {
        self.run(sql, args, 0)?;
        // SAFETY: set by the run.
        let table = unsafe { pg_sys::SPI_tuptable };
        if table.is_null() {
            return Err(Error::internal("statement returned no rows to read"));
        }
        Ok(Rows { table, spi: self })
    }

    /// `read` of the first row; None for no row.
    pub fn query_one<T>(
        &self,
        sql: &'static str,
        args: &[Arg],
        read: impl FnOnce(&Row<'_>) -> Result<T>,
    ) -> Result<Option<T>> {
        let rows = self.query(sql, args)?;
        let first = rows.iter().next();
        first.map(|row| read(&row)).transpose()
    }

    fn run(&self, sql: &'static str, args: &[Arg], limit: core::ffi::c_long) -> Result<()> {
        let plan = self.plan(sql, args)?;
        let mut values: Vec<Datum> =
            args.iter().map(|arg| arg.value.unwrap_or(Datum::null())).collect();
        let nulls: Vec<core::ffi::c_char> = args
            .iter()
            .map(|arg| if arg.value.is_some() { b' ' } else { b'n' } as core::ffi::c_char)
            .collect();
        // SAFETY: as many values and flags as the plan has parameters, of its types.
        // Not read-only: each statement sees what the ones before it did.
        check(unsafe {
            pg_sys::SPI_execute_plan(plan, values.as_mut_ptr(), nulls.as_ptr(), false, limit)
        })
    }

    fn plan(&self, sql: &'static str, args: &[Arg]) -> Result<pg_sys::SPIPlanPtr> {
        let key = (sql.as_ptr() as usize, sql.len());
        let known = PLANS.with_borrow(|plans| {
            plans.get(&key).map(|known| {
                let same = known.types.iter().eq(args.iter().map(|arg| &arg.oid));
                (known.plan, same)
            })
        });
        match known {
            Some((plan, true)) => return Ok(plan),
            Some((_, false)) => {
                return Err(Error::internal("statement was prepared for other types"));
            }
            None => {}
        }
        let text = CString::new(sql)
            .map_err(|_| Error::internal("statement contains a null character"))?;
        let mut types: Vec<Oid> = args.iter().map(|arg| arg.oid).collect();
        // SAFETY: as many types as arguments; a kept plan lives as long as the process.
        let plan = unsafe {
            let plan = pg_sys::SPI_prepare(text.as_ptr(), types.len() as c_int, types.as_mut_ptr());
            if plan.is_null() {
                return Err(failed(pg_sys::SPI_result));
            }
            check(pg_sys::SPI_keepplan(plan))?;
            plan
        };
        PLANS.with_borrow_mut(|plans| plans.insert(key, Plan { plan, types }));
        Ok(plan)
    }
}

/// The rows of a query, freed when dropped.
pub struct Rows<'s> {
    table: *mut pg_sys::SPITupleTable,
    spi: &'s Spi,
}

impl Rows<'_> {
    pub fn len(&self) -> usize {
        // SAFETY: a live result.
        usize::try_from(unsafe { (*self.table).numvals }).unwrap_or(0)
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn iter(&self) -> impl Iterator<Item = Row<'_>> {
        (0..self.len()).map(|i| Row {
            // SAFETY: within the result.
            tuple: unsafe { *(*self.table).vals.add(i) },
            rows: self,
        })
    }

    /// Reads every row into a value.
    pub fn collect<T>(&self, read: impl FnMut(Row<'_>) -> Result<T>) -> Result<Vec<T>> {
        self.iter().map(read).collect()
    }
}

impl Drop for Rows<'_> {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            // SAFETY: ours, freed once.
            unsafe { pg_sys::SPI_freetuptable(self.table) }
        }
    }
}

/// A row of a result; columns are counted from 1 and trusted to have the type they
/// are asked for.
pub struct Row<'r> {
    tuple: pg_sys::HeapTuple,
    rows: &'r Rows<'r>,
}

impl Row<'_> {
    /// The datum in place: gone with the result.
    pub fn raw(&self, column: i32) -> Option<Datum> {
        let mut is_null = true;
        // SAFETY: a tuple of the result; columns it does not have come back as NULL.
        let value = unsafe {
            pg_sys::SPI_getbinval(self.tuple, (*self.rows.table).tupdesc, column, &mut is_null)
        };
        (!is_null).then_some(value)
    }

    fn get<T: FromDatum>(&self, column: i32) -> Option<T> {
        // SAFETY: not null, and of the type that the statement gives this column.
        self.raw(column).map(|value| unsafe { T::from_datum(value) })
    }

    pub fn bool(&self, column: i32) -> Option<bool> {
        self.get(column)
    }

    pub fn i16(&self, column: i32) -> Option<i16> {
        self.get(column)
    }

    pub fn i32(&self, column: i32) -> Option<i32> {
        self.get(column)
    }

    pub fn i64(&self, column: i32) -> Option<i64> {
        self.get(column)
    }

    pub fn f64(&self, column: i32) -> Option<f64> {
        self.get(column)
    }

    pub fn oid(&self, column: i32) -> Option<u32> {
        self.get(column)
    }

    pub fn text(&self, column: i32) -> Option<String> {
        self.get(column)
    }

    pub fn timestamp(&self, column: i32) -> Option<Timestamp> {
        self.get(column)
    }

    pub fn interval(&self, column: i32) -> Option<Interval> {
        self.get(column)
    }

    pub fn uuid(&self, column: i32) -> Option<Uuid> {
        self.get(column)
    }

    pub fn bytea(&self, column: i32) -> Option<Vec<u8>> {
        self.get(column)
    }

    pub fn json(&self, column: i32) -> Option<serde_json::Value> {
        self.get(column)
    }

    /// A varlena, flat and copied into the memory context that `as_owner` was called
    /// in, so that it outlives the connection.
    pub fn copied_varlena(&self, column: i32) -> Option<Datum> {
        let value = self.raw(column)?;
        // SAFETY: not null, and a varlena by the statement; the caller's context
        // outlives the connection.
        Some(memory::switched(self.rows.spi.caller, || unsafe { datum::copy_varlena(value) }))
    }
}

fn check(code: c_int) -> Result<()> {
    if code < 0 { Err(failed(code)) } else { Ok(()) }
}

fn failed(code: c_int) -> Error {
    // SAFETY: a constant string, or one in a static buffer.
    let name = unsafe {
        let name = pg_sys::SPI_result_code_string(code);
        if name.is_null() { "unknown".into() } else { CStr::from_ptr(name).to_string_lossy() }
    };
    Error::internal(format!("SPI failed with {name}"))
}
