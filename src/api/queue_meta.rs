//! The view `awa.queue_meta`: pauses, as clients of awa 0.6 write them.

use super::access;
use super::args::{check_name, required};
use crate::error::{Error, Result, SqlState};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::trigger::{self, Event};
use crate::pg::{datum, spi, xact};
use crate::store::acl::Profile;
use crate::store::{pauses, queues};

sql_function!(awa_may_read, may_read);
sql_function!(awa_write_queue_meta, write);
sql_function!(awa_show_pause, show);

const QUEUE: i16 = 1;
const PAUSED: i16 = 2;
const PAUSED_BY: i16 = 4;

fn may_read(call: &mut Call) -> Result<Returned> {
    let Some(queue) = call.text(0) else { return Ok(Returned::value(false)) };
    Ok(Returned::value(access::may(&queue, Profile::Reader)?))
}

/// Before a row of `queue_pauses` is written. Our own are; what anybody else writes is a call
/// of pause_queue or resume_queue, which writes the row, so theirs is left out.
fn write(call: &mut Call) -> Result<Returned> {
    let event = trigger::event(call)?;
    let new = trigger::new_row(call)?;
    if spi::is_own() {
        return Ok(Returned::Value(new.datum()));
    }
    let refused = |what: &'static str| Err(Error::new(SqlState::FEATURE_NOT_SUPPORTED, what));
    let queue = required(new.raw(QUEUE).map(datum::own_text), "queue")?;
    match event {
        Event::Insert => {}
        Event::Update => {
            if trigger::row(call)?.raw(QUEUE).map(datum::own_text).as_deref() != Some(&queue) {
                return refused("a queue cannot be renamed");
            }
        }
        _ => return refused("rows of queue_meta cannot be deleted"),
    }
    xact::ensure_writable("awa.pause_queue()")?;
    check_name(&queue, "queue name")?;
    access::check(&queue, Profile::Operator)?;
    let by = new.raw(PAUSED_BY).map(datum::own_text);
    queues::set_paused(&queue, new.bool(PAUSED).unwrap_or(false), by.as_deref())?;
    Ok(Returned::Void)
}

/// After a pause of `queues` was written.
fn show(call: &mut Call) -> Result<Returned> {
    trigger::ensure(call)?;
    // It is the first column there, too.
    if let Some(queue) = trigger::new_row(call)?.raw(QUEUE).map(datum::own_text) {
        pauses::show(&queue)?;
    }
    Ok(Returned::Void)
}
