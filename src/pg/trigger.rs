//! Trigger functions.

use core::ffi::c_int;

use pgrx::pg_sys;

use super::call::Call;
use super::datum::Datum;
use crate::error::{Error, Result, SqlState};

/// 55000 unless the call comes from the trigger manager (CALLED_AS_TRIGGER, trigger.h).
pub fn ensure(call: &Call) -> Result<()> {
    // SAFETY: the context of a running call.
    let is_trigger = unsafe {
        let context = (*call.info()).context;
        !context.is_null() && (*context).type_ == pg_sys::NodeTag::T_TriggerData
    };
    if is_trigger {
        return Ok(());
    }
    Err(Error::new(SqlState::WRONG_STATE, "function was not called by a trigger"))
}

fn data(call: &Call) -> Result<pg_sys::TriggerData> {
    ensure(call)?;
    // SAFETY: the context of a trigger call is its TriggerData (trigger.h).
    Ok(unsafe { *(*call.info()).context.cast::<pg_sys::TriggerData>() })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    Insert,
    Delete,
    Update,
    Truncate,
}

/// What the trigger was called for (TRIGGER_FIRED_BY_INSERT and its like, trigger.h).
pub fn event(call: &Call) -> Result<Event> {
    Ok(match data(call)?.tg_event & pg_sys::TRIGGER_EVENT_OPMASK {
        pg_sys::TRIGGER_EVENT_INSERT => Event::Insert,
        pg_sys::TRIGGER_EVENT_DELETE => Event::Delete,
        pg_sys::TRIGGER_EVENT_UPDATE => Event::Update,
        _ => Event::Truncate,
    })
}

/// A row that a trigger looks at. Columns are counted from 1.
pub struct Tuple {
    tuple: pg_sys::HeapTuple,
    relation: pg_sys::Relation,
}

/// The row that is inserted or deleted, or the one that an update replaces.
pub fn row(call: &Call) -> Result<Tuple> {
    let data = data(call)?;
    Tuple::of(data.tg_trigtuple, data.tg_relation)
}

/// The row as it is going to be: what an update makes of it, else the same.
pub fn new_row(call: &Call) -> Result<Tuple> {
    let data = data(call)?;
    let tuple = if data.tg_newtuple.is_null() { data.tg_trigtuple } else { data.tg_newtuple };
    Tuple::of(tuple, data.tg_relation)
}

impl Tuple {
    fn of(tuple: pg_sys::HeapTuple, relation: pg_sys::Relation) -> Result<Self> {
        if tuple.is_null() {
            return Err(Error::new(SqlState::WRONG_STATE, "function was not called for a row"));
        }
        Ok(Self { tuple, relation })
    }

    /// A column as it lies in the row, possibly toasted.
    pub fn raw(&self, column: i16) -> Option<Datum> {
        let mut is_null = false;
        // SAFETY: the tuple is of the relation, whose descriptor says where the column is.
        let value = unsafe {
            let descriptor = (*self.relation).rd_att;
            pg_sys::heap_getattr(self.tuple, c_int::from(column), descriptor, &mut is_null)
        };
        (!is_null).then_some(value)
    }

    pub fn i16(&self, column: i16) -> Option<i16> {
        self.raw(column).map(|value| value.value() as i16)
    }

    /// A bigint, or the microseconds of a timestamptz.
    pub fn i64(&self, column: i16) -> Option<i64> {
        self.raw(column).map(|value| value.value() as i64)
    }

    pub fn bool(&self, column: i16) -> Option<bool> {
        self.raw(column).map(|value| value.value() as u8 != 0)
    }

    /// What the trigger returns to let the row pass.
    pub fn datum(&self) -> Datum {
        Datum::from(self.tuple)
    }

    /// What the trigger returns to put another row of the relation in its place.
    pub fn like(&self, values: &[Option<Datum>]) -> Result<Datum> {
        // SAFETY: the trigger's relation is open.
        let (descriptor, width) = unsafe {
            let descriptor = (*self.relation).rd_att;
            (descriptor, usize::try_from((*descriptor).natts).unwrap_or(0))
        };
        if values.len() != width {
            return Err(Error::internal("a trigger's row has the wrong width"));
        }
        let mut nulls: Vec<bool> = values.iter().map(Option::is_none).collect();
        let mut values: Vec<Datum> = values.iter().map(|v| v.unwrap_or(Datum::null())).collect();
        // SAFETY: as many values as the descriptor has columns, of its types.
        let tuple =
            unsafe { pg_sys::heap_form_tuple(descriptor, values.as_mut_ptr(), nulls.as_mut_ptr()) };
        Ok(Datum::from(tuple))
    }
}
