//! register_runtime, heartbeat, deregister_runtime, and what memory knows of runtimes.

use serde_json::{Map, Value};
use uuid::Uuid;

use super::access;
use super::args::{duration, options, required};
use crate::dispatch;
use crate::dispatch::close::{self, Closer};
use crate::domain::dispatcher::Dispatcher;
use crate::domain::entities::{Liveness, Phase, Runtime};
use crate::domain::table::NIL;
use crate::domain::undo::Act;
use crate::error::{Error, Result, SqlState};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{Timestamp, ToDatum};
use crate::pg::{guc, latch, role, xact};
use crate::store::acl::Profile;
use crate::store::{body, runtimes};

sql_function!(awa_register_runtime, register);
sql_function!(awa_heartbeat, heartbeat);
sql_function!(awa_deregister_runtime, deregister);
sql_function!(awa_runtime_state, state);

const SHORTEST_TIMEOUT: i64 = 1_000_000;

/// Attempts of so many queues are shown apart.
const MOST_QUEUES: usize = 64;

fn register(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.register_runtime()")?;
    access::check_any(&[Profile::Worker])?;
    let name = call.text(0);
    let liveness = match call.text(1).as_deref() {
        None | Some("session") => Liveness::Session,
        Some("heartbeat") => Liveness::Heartbeat,
        Some(other) => {
            return Err(Error::invalid(format!("unknown liveness \"{other}\""))
                .hint("Use session or heartbeat."));
        }
    };
    let timeout = duration(call.interval(2), "heartbeat_timeout")?
        .unwrap_or(guc::heartbeat_staleness().as_micros() as i64);
    if timeout < SHORTEST_TIMEOUT {
        return Err(Error::invalid("heartbeat_timeout must be at least 1 second"));
    }
    let host = host_in(call.jsonb_value(3).unwrap_or(Value::Null))?;
    let opts = call.jsonb_text(3).unwrap_or_else(|| "{}".to_owned());
    let id = *Uuid::new_v4().as_bytes();
    let pid = latch::my_pid();
    let now = xact::micros();
    dispatch::reserve_log(1)?;
    let db = dispatch::attach()?;
    runtimes::write(
        &runtimes::NewRuntime {
            id,
            name: name.as_deref(),
            heartbeat: liveness == Liveness::Heartbeat,
            timeout,
            host: host.as_deref(),
            pid,
            opts: &opts,
        },
        xact::user_id(),
    )?;
    let subxact = xact::current_subxact();
    let proc = latch::my_proc_number() + 1;
    let registered = dispatch::with(|d| {
        let runtime = d.register(
            Runtime {
                db,
                liveness,
                dead: false,
                id,
                proc,
                pid,
                timeout,
                timer: Default::default(),
                last_seen: now,
                claims: NIL,
                open: 0,
                asked: false,
            },
            now,
        )?;
        dispatch::log_act(d, db, subxact, Act::Register { runtime, id });
        Ok(())
    });
    registered.map_err(dispatch::capacity)?;
    Ok(Returned::value(id))
}

/// The host that a runtime names, once what it says of itself has the shape that the view
/// `runtime_instances` relies on.
fn host_in(opts: Value) -> Result<Option<String>> {
    let mut members = options(opts, "opts", &["queues", "capabilities", "version", "host"])?;
    let is_list = |names: &[Value]| names.iter().all(Value::is_string);
    match members.get("queues") {
        None | Some(Value::Null) => {}
        Some(Value::Array(names)) if is_list(names) => {}
        Some(_) => return Err(Error::invalid("queues must be an array of strings")),
    }
    let mut text = |key: &str| match members.remove(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(Error::invalid(format!("{key} must be a string"))),
    };
    text("version")?;
    text("host")
}

fn heartbeat(call: &mut Call) -> Result<Returned> {
    let id = required(call.uuid(0), "runtime")?;
    let now = xact::micros();
    let holding = call.i64_array(1)?;
    let mut rows = call.rows()?;
    let is_alive =
        |d: &mut Dispatcher<'_>, db| d.runtime(db, &id).is_some_and(|at| !d.runtimes[at].dead);
    if !dispatch::with_open(is_alive)? {
        return Err(dispatch::runtime_gone());
    }
    check_owner(&id)?;
    let alive = dispatch::with_open(|d, db| {
        d.runtime(db, &id).map(|at| (d.beat(at, now), d.runtimes[at].timeout))
    })?;
    let Some((true, timeout)) = alive else { return Err(dispatch::runtime_gone()) };
    if let Some(holding) = holding {
        let mut known: Vec<i64> = holding.into_iter().flatten().collect();
        known.sort_unstable();
        // A claim whose answer never arrived: nobody works on it.
        let mut lost = open_items(&id, now.saturating_sub(timeout))?;
        lost.retain(|receipt| known.binary_search(receipt).is_err());
        if !lost.is_empty() {
            xact::ensure_writable("awa.heartbeat()")?;
            lost.sort_unstable();
            close::give_back(close::take(&lost, Closer::Rescue)?)?;
        }
    }
    for (receipt, segment, position) in asked_items(&id)? {
        // An attempt that ended just now may have no body any more.
        if let Some(job_id) = body::job_id_at(segment, position)? {
            rows.push(&[Some(receipt.to_datum()), Some(job_id.to_datum())])?;
        }
    }
    Ok(Returned::Void)
}

fn deregister(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.deregister_runtime()")?;
    let id = required(call.uuid(0), "runtime")?;
    let release = call.bool(1).unwrap_or(true);
    let known = dispatch::with_open(|d, db| {
        d.runtime(db, &id).filter(|at| !d.runtimes[*at].dead).map(|at| (db, at))
    })?;
    let Some((db, runtime)) = known else { return Err(dispatch::runtime_gone()) };
    check_owner(&id)?;
    let mut open = open_items(&id, i64::MAX)?;
    let mut released = 0;
    if release && !open.is_empty() {
        open.sort_unstable();
        released = close::give_back(close::take(&open, Closer::Owner)?)?;
    }
    dispatch::reserve_log(1)?;
    runtimes::end(&[id])?;
    let subxact = xact::current_subxact();
    dispatch::with(|d| {
        dispatch::log_act(d, db, subxact, Act::Deregister { runtime, id });
    });
    Ok(Returned::value(released as i64))
}

/// What memory knows of a runtime, for the view `runtime_instances`.
///
/// Arguments: runtime. Result, one row: whether it lives, when it was seen last (a session:
/// now), how many attempts are open in its care, and how many of each queue. NULLs on a
/// standby and while memory is rebuilt.
fn state(call: &mut Call) -> Result<Returned> {
    access::check_any(&[Profile::Operator, Profile::Reader])?;
    let id = required(call.uuid(0), "runtime")?;
    let mut rows = call.rows()?;
    let mut flights = Vec::with_capacity(MOST_QUEUES);
    let Some((alive, open)) = look_up(&id, &mut flights)? else {
        rows.push(&[None, None, None, None])?;
        return Ok(Returned::Void);
    };
    let seen = alive.map(|runtime| match runtime.liveness {
        Liveness::Session => xact::micros(),
        Liveness::Heartbeat => runtime.last_seen,
    });
    let mut shown = Map::new();
    for (queue, count) in flights {
        let queue = dispatch::queue_name(queue);
        if access::may(&queue, Profile::Reader)? {
            shown.insert(queue, Value::from(count));
        }
    }
    rows.push(&[
        Some(alive.is_some().to_datum()),
        seen.map(|at| Timestamp(at).to_datum()),
        Some(open.to_datum()),
        Some(Value::Object(shown).to_datum()),
    ])?;
    Ok(Returned::Void)
}

/// The runtime if it lives, and how many attempts are in its care; None without a dispatcher.
fn look_up(id: &[u8; 16], flights: &mut Vec<(u32, i64)>) -> Result<Option<(Option<Runtime>, i64)>> {
    if xact::is_in_recovery() {
        return Ok(None);
    }
    let db = dispatch::attach()?;
    Ok(dispatch::with(|d| {
        if d.base(db).phase != Phase::Open {
            return None;
        }
        let Some(at) = d.runtime(db, id) else { return Some((None, 0)) };
        let open = d.in_flight_of(at, flights);
        Some((Some(d.runtimes[at]).filter(|runtime| !runtime.dead), open))
    }))
}

/// 42501 unless the caller has the privileges of the role that registered the runtime.
fn check_owner(id: &[u8; 16]) -> Result<()> {
    if access::is_master()? {
        return Ok(());
    }
    match runtimes::registered_by(*id)? {
        Some(owner) if role::has_privileges_of(xact::user_id(), owner) => Ok(()),
        _ => Err(Error::new(
            SqlState::INSUFFICIENT_PRIVILEGE,
            "permission denied: another role registered the runtime",
        )),
    }
}

/// Receipts of the open attempts of a runtime that were claimed before a time. Room is made
/// before the lock is taken, and more of it when there was too little.
fn open_items(id: &[u8; 16], before: i64) -> Result<Vec<i64>> {
    let mut receipts = Vec::with_capacity(64);
    loop {
        receipts.clear();
        if dispatch::with_open(|d, db| d.items_of(db, id, before, &mut receipts))? {
            return Ok(receipts);
        }
        receipts.reserve(2 * receipts.capacity());
    }
}

/// The attempts of a runtime that were asked to stop: receipt, segment, position.
fn asked_items(id: &[u8; 16]) -> Result<Vec<(i64, u8, i64)>> {
    let mut asked = Vec::with_capacity(16);
    loop {
        asked.clear();
        let is_all = dispatch::with_open(|d, db| {
            d.runtime(db, id).is_none_or(|at| {
                // From here on it knows.
                d.runtimes[at].asked = false;
                d.asked_of(at, &mut asked)
            })
        })?;
        if is_all {
            return Ok(asked);
        }
        asked.reserve(2 * asked.capacity());
    }
}
