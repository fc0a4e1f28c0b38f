//! Values between Rust and the server. What is made here lives in the current memory
//! context; what is read is copied, except where a function says otherwise.

use core::ffi::{CStr, c_char, c_int};
use core::ptr;
use std::borrow::Cow;

pub use pgrx::pg_sys::Datum;
use pgrx::pg_sys::{self, Oid};

use crate::error::{Error, Result, SqlState};

pub type Uuid = [u8; 16];

/// Microseconds since 2000-01-01 UTC, as the server keeps them; the two ends of the
/// range are -infinity and infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Timestamp(pub i64);

impl Timestamp {
    /// The last one before infinity (END_TIMESTAMP, timestamp.h).
    pub const LAST: i64 = 9_223_371_331_199_999_999;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    pub months: i32,
    pub days: i32,
    pub micros: i64,
}

impl Interval {
    /// With months of 30 days and days of 24 hours, as the server compares intervals
    /// (interval_cmp_value, timestamp.c). Saturates.
    pub fn to_micros(self) -> i64 {
        let days = i128::from(self.months) * 30 + i128::from(self.days);
        let micros = days * 86_400_000_000 + i128::from(self.micros);
        micros.clamp(i128::from(i64::MIN), i128::from(i64::MAX)) as i64
    }

    pub fn of_micros(micros: i64) -> Self {
        Self { months: 0, days: 0, micros }
    }
}

/// An interval from its text; raises what interval_in does.
pub fn parse_interval(text: &str) -> Result<Interval> {
    ensure_no_nul(text)?;
    // SAFETY: interval_in takes a C string, a type oid that it ignores, and no typmod.
    let datum = super::boundary::catch(|| unsafe { input(pg_sys::interval_in, text) })
        .map_err(|_| Error::invalid(format!("invalid interval: \"{text}\"")))?;
    // SAFETY: what interval_in returns.
    Ok(unsafe { Interval::from_datum(datum) })
}

/// A timestamptz from its text; raises what timestamptz_in does.
pub fn parse_timestamp(text: &str) -> Result<Timestamp> {
    ensure_no_nul(text)?;
    // SAFETY: as above.
    let datum = super::boundary::catch(|| unsafe { input(pg_sys::timestamptz_in, text) })
        .map_err(|_| Error::invalid(format!("invalid timestamp: \"{text}\"")))?;
    // SAFETY: what timestamptz_in returns.
    Ok(unsafe { Timestamp::from_datum(datum) })
}

type Function = unsafe fn(pg_sys::FunctionCallInfo) -> Datum;

/// # Safety
/// `function` is the input function of a type with a typmod.
unsafe fn input(function: Function, text: &str) -> Result<Datum> {
    let text = to_server(text);
    // SAFETY: the caller vouches for the function; pnstrdup ends the string.
    unsafe {
        let text = pg_sys::pnstrdup(text.as_ptr().cast(), text.len());
        let args = [
            Some(Datum::from(text)),
            Some(Datum::from(pg_sys::InvalidOid)),
            Some(Datum::from(-1_i32)),
        ];
        pgrx::direct_function_call_as_datum(function, &args)
            .ok_or_else(|| crate::error::Error::internal("input function returned null"))
    }
}

/// An interval of one of our own rows, whose column has that type.
pub fn own_interval(datum: Datum) -> Interval {
    // SAFETY: the store hands out only what its table defines.
    unsafe { Interval::from_datum(datum) }
}

/// A jsonb of one of our own rows, whose column has that type.
pub fn own_json(datum: Datum) -> serde_json::Value {
    // SAFETY: as above.
    unsafe { serde_json::Value::from_datum(datum) }
}

/// A bytea of one of our own rows.
pub fn own_bytes(datum: Datum) -> Vec<u8> {
    // SAFETY: as above.
    unsafe { FromDatum::from_datum(datum) }
}

/// A text of one of our own rows.
pub fn own_text(datum: Datum) -> String {
    // SAFETY: as above.
    unsafe { FromDatum::from_datum(datum) }
}

/// A text[] of one of our own rows; NULL elements are left out.
pub fn own_texts(datum: Datum) -> Vec<String> {
    // SAFETY: as above.
    let elements = unsafe { elements(datum, Element::TEXT) }.unwrap_or_default();
    elements.into_iter().flatten().map(own_text).collect()
}

/// A bit(8) of one of our own rows.
pub fn own_bits8(datum: Datum) -> Bits8 {
    // SAFETY: as above.
    unsafe { FromDatum::from_datum(datum) }
}

/// A varlena argument in plain form: detoasted, so that it may be written to a table.
pub fn own_plain(datum: Datum) -> Datum {
    // SAFETY: of an argument whose declared type is a varlena.
    Datum::from(unsafe { pg_sys::pg_detoast_datum(datum.cast_mut_ptr()) })
}

/// The text of a jsonb argument, as jsonb_out gives it.
pub fn own_json_text(datum: Datum) -> String {
    // SAFETY: as above; arguments have the types that the function declares.
    unsafe { json_text(datum) }
}

/// The value of a `bit(8)` column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bits8(pub u8);

/// The value of a `"char"` column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Char(pub u8);

/// JSON text on its way into a jsonb.
pub struct Json<'a>(pub &'a str);

/// A value Postgres can take.
pub trait ToDatum {
    fn to_datum(&self) -> Datum;
}

macro_rules! by_value {
    ($($type:ty),*) => { $(
        impl ToDatum for $type {
            fn to_datum(&self) -> Datum {
                Datum::from(*self)
            }
        }
    )* };
}
by_value!(bool, i16, i32, i64);

impl ToDatum for f64 {
    fn to_datum(&self) -> Datum {
        Datum::from(self.to_bits() as i64)
    }
}

impl ToDatum for Datum {
    fn to_datum(&self) -> Datum {
        *self
    }
}

impl ToDatum for Timestamp {
    fn to_datum(&self) -> Datum {
        Datum::from(self.0)
    }
}

impl ToDatum for Char {
    fn to_datum(&self) -> Datum {
        Datum::from(self.0 as i8)
    }
}

impl ToDatum for Oid {
    fn to_datum(&self) -> Datum {
        Datum::from(*self)
    }
}

impl ToDatum for str {
    fn to_datum(&self) -> Datum {
        let text = to_server(self);
        // SAFETY: copies `len` bytes.
        let text =
            unsafe { pg_sys::cstring_to_text_with_len(text.as_ptr().cast(), text.len() as c_int) };
        Datum::from(text)
    }
}

impl ToDatum for String {
    fn to_datum(&self) -> Datum {
        self.as_str().to_datum()
    }
}

impl ToDatum for [u8] {
    /// A bytea.
    fn to_datum(&self) -> Datum {
        // SAFETY: a text and a bytea are the same bytes behind the same header.
        let bytes =
            unsafe { pg_sys::cstring_to_text_with_len(self.as_ptr().cast(), self.len() as c_int) };
        Datum::from(bytes)
    }
}

impl ToDatum for Uuid {
    fn to_datum(&self) -> Datum {
        // SAFETY: pg_uuid_t is sixteen bytes without alignment.
        unsafe {
            let uuid: *mut u8 = pg_sys::palloc(size_of::<Uuid>()).cast();
            ptr::copy_nonoverlapping(self.as_ptr(), uuid, self.len());
            Datum::from(uuid)
        }
    }
}

impl ToDatum for Interval {
    fn to_datum(&self) -> Datum {
        // SAFETY: palloc aligns for any type.
        unsafe {
            let interval: *mut pg_sys::Interval =
                pg_sys::palloc(size_of::<pg_sys::Interval>()).cast();
            interval.write(pg_sys::Interval {
                time: self.micros,
                day: self.days,
                month: self.months,
            });
            Datum::from(interval)
        }
    }
}

impl ToDatum for Bits8 {
    fn to_datum(&self) -> Datum {
        // SAFETY: a VarBit of eight bits is its header, the length in bits, one byte.
        unsafe {
            let size = VARHDRSZ + size_of::<i32>() + 1;
            let bits: *mut u8 = pg_sys::palloc(size).cast();
            set_varsize_4b(bits, size);
            bits.add(VARHDRSZ).cast::<i32>().write(8);
            bits.add(VARHDRSZ + size_of::<i32>()).write(self.0);
            Datum::from(bits)
        }
    }
}

impl ToDatum for Json<'_> {
    /// Raises 22P02 for what is not JSON.
    fn to_datum(&self) -> Datum {
        let text = to_server(self.0);
        // SAFETY: copies the bytes; jsonb_in reads its one argument, a C string.
        unsafe {
            let text = pg_sys::pnstrdup(text.as_ptr().cast(), text.len());
            pgrx::direct_function_call_as_datum(pg_sys::jsonb_in, &[Some(Datum::from(text))])
                .unwrap_or(Datum::null())
        }
    }
}

impl ToDatum for serde_json::Value {
    fn to_datum(&self) -> Datum {
        Json(&self.to_string()).to_datum()
    }
}

impl<T: ToDatum + ?Sized> ToDatum for &T {
    fn to_datum(&self) -> Datum {
        (**self).to_datum()
    }
}

/// A jsonb object with the members of another one, which win.
pub fn json_merged(object: Datum, other: Datum) -> Datum {
    // SAFETY: jsonb_concat takes two jsonbs, which our rows and `Json` give.
    unsafe {
        pgrx::direct_function_call_as_datum(pg_sys::jsonb_concat, &[Some(object), Some(other)])
            .unwrap_or(object)
    }
}

/// What an array is made of: type, width (-1: varlena), by value, alignment.
#[derive(Clone, Copy)]
pub struct Element {
    pub oid: Oid,
    width: i16,
    by_value: bool,
    align: u8,
}

impl Element {
    pub const INT2: Self = Self::new(pg_sys::INT2OID, 2, true, pg_sys::TYPALIGN_SHORT);
    pub const INT4: Self = Self::new(pg_sys::INT4OID, 4, true, pg_sys::TYPALIGN_INT);
    pub const INT8: Self = Self::new(pg_sys::INT8OID, 8, true, pg_sys::TYPALIGN_DOUBLE);
    pub const TIMESTAMPTZ: Self =
        Self::new(pg_sys::TIMESTAMPTZOID, 8, true, pg_sys::TYPALIGN_DOUBLE);
    pub const TEXT: Self = Self::new(pg_sys::TEXTOID, -1, false, pg_sys::TYPALIGN_INT);
    pub const BYTEA: Self = Self::new(pg_sys::BYTEAOID, -1, false, pg_sys::TYPALIGN_INT);
    pub const JSONB: Self = Self::new(pg_sys::JSONBOID, -1, false, pg_sys::TYPALIGN_INT);
    pub const BIT: Self = Self::new(pg_sys::BITOID, -1, false, pg_sys::TYPALIGN_INT);
    pub const UUID: Self = Self::new(pg_sys::UUIDOID, 16, false, pg_sys::TYPALIGN_CHAR);

    /// Labels of an enum, as their oids.
    pub const fn enumeration(oid: u32) -> Self {
        Self::new(Oid::from_u32(oid), 4, true, pg_sys::TYPALIGN_INT)
    }

    const fn new(oid: Oid, width: i16, by_value: bool, align: u8) -> Self {
        Self { oid, width, by_value, align }
    }
}

/// A one-dimensional array; None is a NULL element.
pub fn array(element: Element, values: &[Option<Datum>]) -> Datum {
    let mut nulls: Vec<bool> = values.iter().map(Option::is_none).collect();
    let mut values: Vec<Datum> = values.iter().map(|v| v.unwrap_or(Datum::null())).collect();
    build_array(element, &mut values, Some(&mut nulls))
}

/// A one-dimensional array without NULLs.
pub fn array_of<T: ToDatum>(element: Element, values: &[T]) -> Datum {
    let mut values: Vec<Datum> = values.iter().map(ToDatum::to_datum).collect();
    build_array(element, &mut values, None)
}

pub fn bigint_array(values: &[i64]) -> Datum {
    array_of(Element::INT8, values)
}

pub fn smallint_array(values: &[i16]) -> Datum {
    array_of(Element::INT2, values)
}

pub fn text_array<T: AsRef<str>>(values: &[T]) -> Datum {
    let mut values: Vec<Datum> = values.iter().map(|text| text.as_ref().to_datum()).collect();
    build_array(Element::TEXT, &mut values, None)
}

fn build_array(element: Element, values: &mut [Datum], nulls: Option<&mut [bool]>) -> Datum {
    let mut dims = [values.len() as c_int];
    let mut lower_bounds = [1];
    // SAFETY: one dimension of as many elements; construct_md_array copies them and
    // makes the empty array of nothing.
    let array = unsafe {
        pg_sys::construct_md_array(
            values.as_mut_ptr(),
            nulls.map_or(ptr::null_mut(), <[bool]>::as_mut_ptr),
            1,
            dims.as_mut_ptr(),
            lower_bounds.as_mut_ptr(),
            element.oid,
            c_int::from(element.width),
            element.by_value,
            element.align as c_char,
        )
    };
    Datum::from(array)
}

/// The elements of an array; 22023 for more than one dimension. By-reference
/// elements point into the (detoasted) array.
///
/// # Safety
/// `array` is a non-null array of `element`.
pub unsafe fn elements(array: Datum, element: Element) -> Result<Vec<Option<Datum>>> {
    // SAFETY: the caller vouches for the type; deconstruct_array gives two arrays
    // of `count`.
    unsafe {
        let array: *mut pg_sys::ArrayType = pg_sys::pg_detoast_datum(array.cast_mut_ptr()).cast();
        if (*array).ndim > 1 {
            return Err(Error::invalid("array must not have more than one dimension"));
        }
        let mut values = ptr::null_mut();
        let mut nulls = ptr::null_mut();
        let mut count = 0;
        pg_sys::deconstruct_array(
            array,
            element.oid,
            c_int::from(element.width),
            element.by_value,
            element.align as c_char,
            &mut values,
            &mut nulls,
            &mut count,
        );
        Ok((0..usize::try_from(count).unwrap_or(0))
            .map(|i| (!*nulls.add(i)).then(|| *values.add(i)))
            .collect())
    }
}

/// Whether an array of bigint without nulls has the value.
///
/// # Safety
/// `array` is a non-null value of such a type.
pub unsafe fn bigint_array_has(array: Datum, value: i64) -> bool {
    /// Dimensions, offset of data (none without nulls), element type, length and lower bound
    /// (array.h); the elements follow at once.
    const HEAD: usize = 20;
    // SAFETY: the caller vouches; the packed form may be unaligned, so bytes are compared. What
    // was copied is freed.
    unsafe {
        let given: *mut pg_sys::varlena = array.cast_mut_ptr();
        let flat = pg_sys::pg_detoast_datum_packed(given);
        let bytes = core::slice::from_raw_parts(
            pgrx::vardata_any(flat).cast::<u8>(),
            pgrx::varsize_any_exhdr(flat),
        );
        let elements = bytes.get(HEAD..).unwrap_or_default();
        let found = elements.chunks_exact(8).any(|element| element == value.to_ne_bytes());
        if flat != given {
            pg_sys::pfree(flat.cast());
        }
        found
    }
}

/// A type that can be read from a non-null datum.
pub trait FromDatum: Sized {
    /// # Safety
    /// `datum` is a non-null value of the SQL type that `Self` stands for.
    unsafe fn from_datum(datum: Datum) -> Self;
}

macro_rules! from_value {
    ($($type:ty),*) => { $(
        impl FromDatum for $type {
            unsafe fn from_datum(datum: Datum) -> Self {
                datum.value() as $type
            }
        }
    )* };
}
from_value!(i16, i32, i64, u32);

impl FromDatum for bool {
    unsafe fn from_datum(datum: Datum) -> Self {
        datum.value() as u8 != 0
    }
}

impl FromDatum for f64 {
    unsafe fn from_datum(datum: Datum) -> Self {
        f64::from_bits(datum.value() as u64)
    }
}

impl FromDatum for Datum {
    unsafe fn from_datum(datum: Datum) -> Self {
        datum
    }
}

impl FromDatum for Oid {
    unsafe fn from_datum(datum: Datum) -> Self {
        Oid::from(datum.value() as u32)
    }
}

impl FromDatum for Timestamp {
    unsafe fn from_datum(datum: Datum) -> Self {
        Timestamp(datum.value() as i64)
    }
}

impl FromDatum for Char {
    unsafe fn from_datum(datum: Datum) -> Self {
        Char(datum.value() as u8)
    }
}

impl FromDatum for String {
    unsafe fn from_datum(datum: Datum) -> Self {
        // SAFETY: the caller vouches for a text; the bytes are copied before they
        // can go away.
        unsafe {
            let detoasted = Detoasted::of(datum);
            from_server(detoasted.bytes()).into_owned()
        }
    }
}

/// The text of a `name`.
///
/// # Safety
/// `datum` is a name.
pub(super) unsafe fn name_text(datum: Datum) -> String {
    // SAFETY: a name is NUL-terminated within its 64 bytes (c.h, NameData).
    unsafe { from_server(CStr::from_ptr(datum.cast_mut_ptr()).to_bytes()).into_owned() }
}

impl FromDatum for Vec<u8> {
    unsafe fn from_datum(datum: Datum) -> Self {
        // SAFETY: the caller vouches for a bytea, or another varlena.
        unsafe { Detoasted::of(datum).bytes().to_vec() }
    }
}

impl FromDatum for Uuid {
    unsafe fn from_datum(datum: Datum) -> Self {
        // SAFETY: the caller vouches for a uuid, which is sixteen bytes.
        unsafe { datum.cast_mut_ptr::<Uuid>().read_unaligned() }
    }
}

impl FromDatum for Interval {
    unsafe fn from_datum(datum: Datum) -> Self {
        // SAFETY: the caller vouches for an interval.
        let interval = unsafe { datum.cast_mut_ptr::<pg_sys::Interval>().read_unaligned() };
        Interval { months: interval.month, days: interval.day, micros: interval.time }
    }
}

impl FromDatum for Bits8 {
    unsafe fn from_datum(datum: Datum) -> Self {
        // SAFETY: the caller vouches for a bit string: its length in bits, its bytes.
        let bytes: Vec<u8> = unsafe { FromDatum::from_datum(datum) };
        Bits8(bytes.get(size_of::<i32>()).copied().unwrap_or(0))
    }
}

impl FromDatum for serde_json::Value {
    unsafe fn from_datum(datum: Datum) -> Self {
        // SAFETY: the caller vouches for a jsonb; jsonb_out returns a C string.
        let text = unsafe { json_text(datum) };
        // A jsonb is JSON by construction. Serde rounds a number beyond its precision, and
        // refuses one beyond its range, or nesting beyond its depth: then its text stands for
        // it, which no caller takes for what it wants.
        serde_json::from_str(&text).unwrap_or(serde_json::Value::String(text))
    }
}

/// A jsonb as text.
///
/// # Safety
/// `datum` is a non-null jsonb.
pub unsafe fn json_text(datum: Datum) -> String {
    // SAFETY: the caller vouches for the type; jsonb_out returns a fresh C string.
    unsafe {
        let text = pgrx::direct_function_call_as_datum(pg_sys::jsonb_out, &[Some(datum)]);
        match text {
            Some(text) => {
                let text: *mut c_char = text.cast_mut_ptr();
                let owned = from_server(CStr::from_ptr(text).to_bytes()).into_owned();
                pg_sys::pfree(text.cast());
                owned
            }
            None => String::new(),
        }
    }
}

/// A varlena copied flat into the current memory context, for a value that must
/// outlive the tuple it was read from.
///
/// # Safety
/// `datum` is a non-null varlena.
pub unsafe fn copy_varlena(datum: Datum) -> Datum {
    // SAFETY: the caller vouches for a varlena.
    Datum::from(unsafe { pg_sys::pg_detoast_datum_copy(datum.cast_mut_ptr()) })
}

const VARHDRSZ: usize = 4;

/// A varlena without compression or indirection; freed if it is a copy.
struct Detoasted {
    flat: *mut pg_sys::varlena,
    is_copy: bool,
}

impl Detoasted {
    /// # Safety
    /// `datum` is a non-null varlena.
    unsafe fn of(datum: Datum) -> Self {
        let original: *mut pg_sys::varlena = datum.cast_mut_ptr();
        // SAFETY: the caller vouches for a varlena.
        let flat = unsafe { pg_sys::pg_detoast_datum_packed(original) };
        Self { flat, is_copy: flat != original }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: flat, hence with a one-byte or four-byte header (postgres.h).
        unsafe { pgrx::varlena_to_byte_slice(self.flat) }
    }
}

impl Drop for Detoasted {
    fn drop(&mut self) {
        if self.is_copy && !std::thread::panicking() {
            // SAFETY: the copy is ours.
            unsafe { pg_sys::pfree(self.flat.cast()) }
        }
    }
}

/// # Safety
/// `varlena` starts a writable allocation of `size` bytes, aligned to four.
unsafe fn set_varsize_4b(varlena: *mut u8, size: usize) {
    // SAFETY: the caller vouches. SET_VARSIZE_4B (varatt.h): the two flag bits are
    // the lowest on little-endian machines, the highest on big-endian ones.
    unsafe {
        let header = if cfg!(target_endian = "big") {
            (size as u32) & 0x3FFF_FFFF
        } else {
            (size as u32) << 2
        };
        varlena.cast::<u32>().write(header);
    }
}

pub(super) fn database_is_utf8() -> bool {
    // SAFETY: a backend-local value.
    unsafe { pg_sys::GetDatabaseEncoding() == UTF8 }
}

const UTF8: c_int = pg_sys::pg_enc::PG_UTF8 as c_int;

/// Bytes of the database's encoding to a string; raises where they have no UTF-8.
pub(super) fn from_server(bytes: &[u8]) -> Cow<'_, str> {
    if database_is_utf8() {
        return String::from_utf8_lossy(bytes);
    }
    // SAFETY: converts `len` bytes; the result is the input itself, or a C string.
    unsafe {
        let input: *const c_char = bytes.as_ptr().cast();
        let output = pg_sys::pg_server_to_any(input, bytes.len() as c_int, UTF8);
        if ptr::eq(output, input) {
            String::from_utf8_lossy(bytes)
        } else {
            CStr::from_ptr(output).to_string_lossy()
        }
    }
}

/// A string to the database's encoding; raises where it has no such character.
pub(super) fn to_server(text: &str) -> &[u8] {
    if database_is_utf8() {
        return text.as_bytes();
    }
    // SAFETY: converts `len` bytes; the result is the input itself, or a C string in
    // the current memory context, which is used up before that goes.
    unsafe {
        let input: *const c_char = text.as_ptr().cast();
        let output = pg_sys::pg_any_to_server(input, text.len() as c_int, UTF8);
        if ptr::eq(output, input) { text.as_bytes() } else { CStr::from_ptr(output).to_bytes() }
    }
}

/// 22021 for a string Postgres cannot hold.
pub fn ensure_no_nul(text: &str) -> Result<()> {
    if text.as_bytes().contains(&0) {
        return Err(Error::new(SqlState(*b"22021"), "text must not contain a null character"));
    }
    Ok(())
}
