//! Taking a jsonb apart without turning it into text: values pass through digit for digit.

use core::slice;

use pgrx::pg_sys;
use serde_json::Value;

use super::datum::{self, Datum, FromDatum};

/// An object inside a jsonb. It points into the jsonb, which lives as long as the call.
pub struct Object {
    members: Vec<(String, pg_sys::JsonbValue)>,
}

impl Object {
    pub fn keys(&self) -> impl Iterator<Item = &String> {
        self.members.iter().map(|(key, _)| key)
    }

    fn get(&self, key: &str) -> Option<&pg_sys::JsonbValue> {
        self.members.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    /// A member as a jsonb of its own, in the current memory context.
    pub fn datum(&self, key: &str) -> Option<Datum> {
        let mut value = *self.get(key)?;
        // SAFETY: a value of a live jsonb; JsonbValueToJsonb makes a copy.
        Some(Datum::from(unsafe { pg_sys::JsonbValueToJsonb(&mut value) }))
    }

    /// A member, read.
    pub fn value(&self, key: &str) -> Option<Value> {
        let value = self.get(key)?;
        // SAFETY: the tag says which part of the union is set.
        unsafe {
            Some(match value.type_ {
                pg_sys::jbvType::jbvNull => Value::Null,
                pg_sys::jbvType::jbvBool => Value::Bool(value.val.boolean),
                pg_sys::jbvType::jbvString => Value::String(text(value)),
                _ => {
                    let mut value = *value;
                    let jsonb = Datum::from(pg_sys::JsonbValueToJsonb(&mut value));
                    Value::from_datum(jsonb)
                }
            })
        }
    }
}

/// # Safety
/// A string value.
unsafe fn text(value: &pg_sys::JsonbValue) -> String {
    // SAFETY: the caller vouches.
    unsafe {
        let string = value.val.string;
        let bytes: &[u8] =
            slice::from_raw_parts(string.val.cast(), usize::try_from(string.len).unwrap_or(0));
        datum::from_server(bytes).into_owned()
    }
}

/// The objects of an array; None for what is not an array of objects.
pub fn objects(jsonb: Datum) -> Option<Vec<Object>> {
    // SAFETY: a non-null jsonb argument; its containers are walked as jsonb_util.c does.
    unsafe {
        let jsonb: *mut pg_sys::Jsonb =
            pg_sys::pg_detoast_datum(jsonb.cast_mut_ptr::<pg_sys::varlena>()).cast();
        let root = core::ptr::addr_of_mut!((*jsonb).root);
        let header = (*root).header;
        if header & pg_sys::JB_FARRAY == 0 || header & pg_sys::JB_FSCALAR != 0 {
            return None;
        }
        let count = header & pg_sys::JB_CMASK;
        let mut objects = Vec::with_capacity(count as usize);
        let mut walk = pg_sys::JsonbIteratorInit(root);
        let mut value: pg_sys::JsonbValue = core::mem::zeroed();
        loop {
            match pg_sys::JsonbIteratorNext(&mut walk, &mut value, true) {
                pg_sys::JsonbIteratorToken::WJB_DONE => return Some(objects),
                pg_sys::JsonbIteratorToken::WJB_ELEM => {
                    if value.type_ != pg_sys::jbvType::jbvBinary {
                        return None;
                    }
                    let container = value.val.binary.data;
                    if (*container).header & pg_sys::JB_FOBJECT == 0 {
                        return None;
                    }
                    objects.push(object(container));
                }
                _ => {}
            }
        }
    }
}

/// # Safety
/// An object container of a live jsonb.
unsafe fn object(container: *mut pg_sys::JsonbContainer) -> Object {
    // SAFETY: the caller vouches.
    unsafe {
        let mut members = Vec::with_capacity(((*container).header & pg_sys::JB_CMASK) as usize);
        let mut walk = pg_sys::JsonbIteratorInit(container);
        let mut value: pg_sys::JsonbValue = core::mem::zeroed();
        let mut key = String::new();
        loop {
            match pg_sys::JsonbIteratorNext(&mut walk, &mut value, true) {
                pg_sys::JsonbIteratorToken::WJB_DONE => return Object { members },
                pg_sys::JsonbIteratorToken::WJB_KEY => key = text(&value),
                pg_sys::JsonbIteratorToken::WJB_VALUE => {
                    members.push((core::mem::take(&mut key), value));
                }
                _ => {}
            }
        }
    }
}
