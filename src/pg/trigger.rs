//! Trigger functions.

use pgrx::pg_sys;

use super::call::Call;
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

/// The row that a BEFORE INSERT trigger looks at.
pub struct NewRow {
    tuple: pg_sys::HeapTuple,
    relation: pg_sys::Relation,
}

/// `ensure` must have passed; an error where the trigger has no row.
pub fn new_row(call: &Call) -> Result<NewRow> {
    // SAFETY: the context of a trigger call is its TriggerData (trigger.h).
    let data = unsafe { *(*call.info()).context.cast::<pg_sys::TriggerData>() };
    if data.tg_trigtuple.is_null() {
        return Err(Error::new(SqlState::WRONG_STATE, "function was not called for a row"));
    }
    Ok(NewRow { tuple: data.tg_trigtuple, relation: data.tg_relation })
}

impl NewRow {
    /// A column, a smallint, counted from 1.
    pub fn i16(&self, column: i16) -> Option<i16> {
        let mut is_null = false;
        // SAFETY: the tuple is of the relation, whose descriptor says where the column is.
        let value = unsafe {
            let descriptor = (*self.relation).rd_att;
            pg_sys::heap_getattr(self.tuple, i32::from(column), descriptor, &mut is_null)
        };
        (!is_null).then(|| value.value() as i16)
    }

    /// What the trigger returns to let the row pass.
    pub fn datum(&self) -> pg_sys::Datum {
        pg_sys::Datum::from(self.tuple)
    }
}
