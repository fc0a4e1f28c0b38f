//! The boundary of SQL functions: a C function of version 1 around a safe one.

use core::ptr;

use pgrx::pg_sys;

use super::datum::{
    self, Bits8, Char, Datum, Element, FromDatum, Interval, Timestamp, ToDatum, Uuid,
};
use super::{boundary, shmem};
use crate::error::{Error, Result};

/// Makes the C function `$symbol` of a safe function with the signature
/// `fn(&mut Call) -> Result<Returned>`; `CREATE FUNCTION ... LANGUAGE c AS
/// 'MODULE_PATHNAME', '$symbol'` declares it.
#[allow(unused_macros)]
macro_rules! sql_function {
    ($symbol:ident, $body:path) => {
        const _: () = {
            // SAFETY: the server looks these two symbols up by name and no other
            // library of a backend exports names that start with awa_.
            #[unsafe(export_name = concat!("pg_finfo_", stringify!($symbol)))]
            pub extern "C" fn finfo() -> &'static ::pgrx::pg_sys::Pg_finfo_record {
                const V1: ::pgrx::pg_sys::Pg_finfo_record =
                    ::pgrx::pg_sys::Pg_finfo_record { api_version: 1 };
                &V1
            }

            // SAFETY: as above.
            #[unsafe(export_name = stringify!($symbol))]
            pub unsafe extern "C-unwind" fn call(
                fcinfo: ::pgrx::pg_sys::FunctionCallInfo,
            ) -> ::pgrx::pg_sys::Datum {
                // SAFETY: called by the function manager, and owns nothing.
                unsafe { $crate::pg::call::enter(fcinfo, $body) }
            }
        };
    };
}
#[allow(unused_imports)]
pub(crate) use sql_function;

/// # Safety
/// Only for `sql_function!`: `fcinfo` comes from the function manager, and the
/// caller owns nothing that would have to be dropped.
pub unsafe fn enter(
    fcinfo: pg_sys::FunctionCallInfo,
    body: fn(&mut Call) -> Result<Returned>,
) -> Datum {
    // SAFETY: the caller vouches for both.
    unsafe {
        boundary::run(|| {
            shmem::ensure_ready()?;
            (*fcinfo).isnull = false;
            let mut call = Call { fcinfo };
            let returned = body(&mut call)?;
            if let Returned::Null = returned {
                (*fcinfo).isnull = true;
            }
            Ok(match returned {
                Returned::Value(value) => value,
                Returned::Null | Returned::Void => Datum::null(),
            })
        })
    }
}

/// What a function gives back.
#[derive(Clone, Copy)]
pub enum Returned {
    Null,
    /// Of a function that returns void, a procedure, or a set (see `Call::rows`).
    Void,
    Value(Datum),
}

impl Returned {
    pub fn value(value: impl ToDatum) -> Self {
        Self::Value(value.to_datum())
    }

    pub fn optional(value: Option<impl ToDatum>) -> Self {
        value.map_or(Self::Null, Self::value)
    }
}

/// One call of a SQL function. Arguments are counted from 0; None is NULL.
///
/// The getters trust the declaration in `sql/install`: argument `i` must have the
/// SQL type the getter is named after.
pub struct Call {
    fcinfo: pg_sys::FunctionCallInfo,
}

impl Call {
    pub(super) fn info(&self) -> pg_sys::FunctionCallInfo {
        self.fcinfo
    }

    /// How many arguments the declaration has.
    pub fn arg_count(&self) -> usize {
        // SAFETY: set by the function manager.
        usize::try_from(unsafe { (*self.fcinfo).nargs }).unwrap_or(0)
    }

    /// The datum as it came: possibly toasted, good for passing through.
    pub fn raw(&self, i: usize) -> Option<Datum> {
        if i >= self.arg_count() {
            return None;
        }
        // SAFETY: within `nargs`.
        unsafe {
            let argument = (*self.fcinfo).args.as_ptr().add(i).read();
            (!argument.isnull).then_some(argument.value)
        }
    }

    fn get<T: FromDatum>(&self, i: usize) -> Option<T> {
        // SAFETY: not null, and of the type that the declaration promises.
        self.raw(i).map(|datum| unsafe { T::from_datum(datum) })
    }

    pub fn text(&self, i: usize) -> Option<String> {
        self.get(i)
    }

    pub fn i16(&self, i: usize) -> Option<i16> {
        self.get(i)
    }

    pub fn i32(&self, i: usize) -> Option<i32> {
        self.get(i)
    }

    pub fn i64(&self, i: usize) -> Option<i64> {
        self.get(i)
    }

    pub fn f64(&self, i: usize) -> Option<f64> {
        self.get(i)
    }

    pub fn bool(&self, i: usize) -> Option<bool> {
        self.get(i)
    }

    pub fn char(&self, i: usize) -> Option<Char> {
        self.get(i)
    }

    pub fn oid(&self, i: usize) -> Option<u32> {
        self.get(i)
    }

    /// A value of type `name`.
    pub fn name(&self, i: usize) -> Option<String> {
        // SAFETY: not null, and a name by declaration: NAMEDATALEN bytes that end in zeros.
        self.raw(i).map(|datum| unsafe { datum::name_text(datum) })
    }

    pub fn timestamp(&self, i: usize) -> Option<Timestamp> {
        self.get(i)
    }

    pub fn interval(&self, i: usize) -> Option<Interval> {
        self.get(i)
    }

    pub fn uuid(&self, i: usize) -> Option<Uuid> {
        self.get(i)
    }

    pub fn bytea(&self, i: usize) -> Option<Vec<u8>> {
        self.get(i)
    }

    pub fn bits8(&self, i: usize) -> Option<Bits8> {
        self.get(i)
    }

    /// A jsonb in plain form: detoasted, not copied where it was so already. One that
    /// is written to a table must not point into another table's TOAST.
    pub fn jsonb(&self, i: usize) -> Option<Datum> {
        // SAFETY: a jsonb is a varlena.
        self.raw(i)
            .map(|datum| Datum::from(unsafe { pg_sys::pg_detoast_datum(datum.cast_mut_ptr()) }))
    }

    pub fn jsonb_value(&self, i: usize) -> Option<serde_json::Value> {
        self.get(i)
    }

    pub fn jsonb_text(&self, i: usize) -> Option<String> {
        // SAFETY: not null, and a jsonb by declaration.
        self.raw(i).map(|datum| unsafe { datum::json_text(datum) })
    }

    /// The elements of an array of any `element` as they are; 22023 for more than one
    /// dimension. By-reference elements live as long as the call.
    pub fn datums(&self, i: usize, element: Element) -> Result<Option<Vec<Option<Datum>>>> {
        // SAFETY: not null, and such an array by declaration.
        self.raw(i).map(|array| unsafe { datum::elements(array, element) }).transpose()
    }

    fn array<T: FromDatum>(&self, i: usize, element: Element) -> Result<Option<Vec<Option<T>>>> {
        let elements = self.datums(i, element)?;
        Ok(elements.map(|elements| {
            elements
                .into_iter()
                // SAFETY: an element of the type that the declaration promises.
                .map(|datum| datum.map(|datum| unsafe { T::from_datum(datum) }))
                .collect()
        }))
    }

    pub fn i16_array(&self, i: usize) -> Result<Option<Vec<Option<i16>>>> {
        self.array(i, Element::INT2)
    }

    pub fn i64_array(&self, i: usize) -> Result<Option<Vec<Option<i64>>>> {
        self.array(i, Element::INT8)
    }

    pub fn text_array(&self, i: usize) -> Result<Option<Vec<Option<String>>>> {
        self.array(i, Element::TEXT)
    }

    pub fn timestamp_array(&self, i: usize) -> Result<Option<Vec<Option<Timestamp>>>> {
        self.array(i, Element::TIMESTAMPTZ)
    }

    pub fn bytea_array(&self, i: usize) -> Result<Option<Vec<Option<Vec<u8>>>>> {
        self.array(i, Element::BYTEA)
    }

    pub fn bits8_array(&self, i: usize) -> Result<Option<Vec<Option<Bits8>>>> {
        self.array(i, Element::BIT)
    }

    pub fn uuid_array(&self, i: usize) -> Result<Option<Vec<Option<Uuid>>>> {
        self.array(i, Element::UUID)
    }

    pub fn jsonb_array(&self, i: usize) -> Result<Option<Vec<Option<Datum>>>> {
        self.datums(i, Element::JSONB)
    }

    /// The value of a function that returns one row.
    pub fn row(&self, values: &[Option<Datum>]) -> Result<Datum> {
        let mut descriptor = ptr::null_mut();
        // SAFETY: `fcinfo` is that of a running call (funcapi.c).
        let class =
            unsafe { pg_sys::get_call_result_type(self.fcinfo, ptr::null_mut(), &mut descriptor) };
        if class != pg_sys::TypeFuncClass::TYPEFUNC_COMPOSITE || descriptor.is_null() {
            return Err(Error::internal("function returns no row"));
        }
        // SAFETY: a composite result has a descriptor.
        let width = usize::try_from(unsafe { (*descriptor).natts }).unwrap_or(0);
        if values.len() != width {
            return Err(Error::internal(format!(
                "function returns a row of {width} columns, not of {}",
                values.len()
            )));
        }
        let mut nulls: Vec<bool> = values.iter().map(Option::is_none).collect();
        let mut values: Vec<Datum> = values.iter().map(|v| v.unwrap_or(Datum::null())).collect();
        // SAFETY: as many values as the descriptor has columns, of its types.
        unsafe {
            let descriptor = pg_sys::BlessTupleDesc(descriptor);
            let tuple =
                pg_sys::heap_form_tuple(descriptor, values.as_mut_ptr(), nulls.as_mut_ptr());
            Ok(pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data))
        }
    }

    /// Makes a set-returning function give its rows at once (materialize mode): push
    /// them, then return `Returned::Void`. For SETOF of a scalar push rows of one.
    pub fn rows(&mut self) -> Result<Rows> {
        // SAFETY: `fcinfo` is that of a running call; the result descriptor and the
        // tuplestore belong to the query (InitMaterializedSRF, funcapi.c), which
        // raises 0A000 where a set cannot be returned.
        unsafe {
            let class = pg_sys::get_call_result_type(self.fcinfo, ptr::null_mut(), ptr::null_mut());
            // A scalar has no row type of its own: the executor expects one column.
            let flags = match class {
                pg_sys::TypeFuncClass::TYPEFUNC_SCALAR => pg_sys::MAT_SRF_USE_EXPECTED_DESC,
                _ => 0,
            };
            pg_sys::InitMaterializedSRF(self.fcinfo, flags);
            let info: *mut pg_sys::ReturnSetInfo = (*self.fcinfo).resultinfo.cast();
            Ok(Rows {
                store: (*info).setResult,
                descriptor: (*info).setDesc,
                width: usize::try_from((*(*info).setDesc).natts).unwrap_or(0),
                values: Vec::new(),
                nulls: Vec::new(),
            })
        }
    }
}

/// Where a set-returning function puts its rows.
pub struct Rows {
    store: *mut pg_sys::Tuplestorestate,
    descriptor: pg_sys::TupleDesc,
    width: usize,
    values: Vec<Datum>,
    nulls: Vec<bool>,
}

impl Rows {
    /// Copies one row; the datums can go at once.
    pub fn push(&mut self, row: &[Option<Datum>]) -> Result<()> {
        if row.len() != self.width {
            return Err(Error::internal(format!(
                "function returns rows of {} columns, not of {}",
                self.width,
                row.len()
            )));
        }
        self.values.clear();
        self.values.extend(row.iter().map(|value| value.unwrap_or(Datum::null())));
        self.nulls.clear();
        self.nulls.extend(row.iter().map(Option::is_none));
        // SAFETY: as many values as the descriptor has columns.
        unsafe {
            pg_sys::tuplestore_putvalues(
                self.store,
                self.descriptor,
                self.values.as_mut_ptr(),
                self.nulls.as_mut_ptr(),
            );
        }
        Ok(())
    }
}
