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
