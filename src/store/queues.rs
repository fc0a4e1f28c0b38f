//! Queues: settings, pauses, totals.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use serde_json::Value;

use crate::domain::dispatcher::Dispatcher;
use crate::domain::entities::{Counts, Db, QueueSettings};
use crate::domain::table::NIL;
use crate::domain::undo::Act;
use crate::error::{Error, Result, SqlState};
use crate::pg::datum::ToDatum;
use crate::pg::heap::{Fate, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::{catalog, latch, spi, xact};
use crate::store::evidence::Ends;
use crate::store::{changes, identity, lanes};
use crate::{dispatch, store::settings};

pub struct QueueRow {
    pub settings: QueueSettings,
    pub paused: bool,
}

/// The row of a queue as it is now, whatever the isolation level; None: it has none.
pub fn read(name: &str) -> Result<Option<QueueRow>> {
    let mut found = None;
    let table = Table::open(catalog::relation("queues")?, LockMode::AccessShare);
    table.index_text(catalog::relation("queues_pkey")?, name, Snapshot::SelfNow, |row| {
        let json = row.json_text(2).unwrap_or_default();
        let value: Value = serde_json::from_str(&json).unwrap_or(Value::Null);
        found = Some(QueueRow {
            settings: settings::from_json(&value),
            paused: row.micros(3).is_some(),
        });
        Ok(false)
    })?;
    table.close_release_lock();
    Ok(found)
}

/// How long a queue waits for room in memory, if the worker can make some, milliseconds.
const ROOM: u32 = 5000;

/// Makes sure that memory has the settings of a queue, and returns its index.
pub fn ensure_loaded(name: &str) -> Result<(Db, u32)> {
    let db = dispatch::attach()?;
    let mut waited = 0;
    loop {
        let seen = dispatch::with(|d| {
            d.ensure_queue(db, name).map(|at| (at, d.queues[at].loaded, d.queues[at].version))
        });
        let (at, loaded, version) = match seen {
            Ok(seen) => seen,
            Err(_) if waited < ROOM && dispatch::with(|d| d.ask_for_room(db)) => {
                latch::wait(10);
                waited += 10;
                continue;
            }
            Err(full) => return Err(dispatch::capacity(full)),
        };
        if loaded {
            return Ok((db, at));
        }
        let row = read(name)?;
        let paused = match &row {
            Some(row) => row.paused,
            None => identity::is_copy()?,
        };
        dispatch::with(|d| {
            // It may have been evicted and the slot given to another one meanwhile.
            if let Some(at) = d.queue(db, name) {
                let queue = &mut d.queues[at];
                // Settings that changed while we read them are read again.
                if queue.version == version {
                    queue.loaded = true;
                    queue.stored = row.is_some();
                    queue.paused = paused;
                    let settings = row.as_ref().map_or_else(Default::default, |r| r.settings);
                    d.set_settings(at, settings);
                }
            }
        });
    }
}

/// When a queue that gets its row was paused: in a copy it always was (see `identity`).
macro_rules! paused_from_the_start {
    () => {
        "(SELECT pg_catalog.clock_timestamp() FROM awa.identity WHERE copied_from IS NOT NULL)"
    };
}

const CREATE: &str = concat!(
    "
INSERT INTO awa.queues (queue, settings, paused_at, created_at,
                        completed_total, failed_total, cancelled_total)
VALUES ($1, '{}', ",
    paused_from_the_start!(),
    ", pg_catalog.clock_timestamp(), 0, 0, 0)
ON CONFLICT (queue) DO NOTHING"
);

const PAUSE: &str = "
INSERT INTO awa.queues (queue, settings, paused_at, paused_by, created_at,
                        completed_total, failed_total, cancelled_total)
VALUES ($1, '{}', pg_catalog.clock_timestamp(), $2, pg_catalog.clock_timestamp(), 0, 0, 0)
ON CONFLICT (queue) DO UPDATE SET paused_at = EXCLUDED.paused_at, paused_by = EXCLUDED.paused_by
WHERE queues.paused_at IS NULL";

const RESUME: &str = "
UPDATE awa.queues SET paused_at = NULL, paused_by = NULL
WHERE queue OPERATOR(pg_catalog.=) $1 AND paused_at IS NOT NULL";

/// Gives the queue its row.
pub fn create(name: &str) -> Result<()> {
    let (db, _) = ensure_loaded(name)?;
    dispatch::reserve_log(1)?;
    spi::as_owner(|spi| spi.execute(CREATE, &[spi::Arg::of(name)]).map(|_| ()))?;
    note_change(db, name)
}

const CONFIGURE: &str = concat!(
    "
INSERT INTO awa.queues AS q (queue, settings, paused_at, created_at,
                             completed_total, failed_total, cancelled_total)
VALUES ($1, pg_catalog.jsonb_strip_nulls($2), ",
    paused_from_the_start!(),
    ", pg_catalog.clock_timestamp(), 0, 0, 0)
ON CONFLICT (queue) DO UPDATE SET
    settings = pg_catalog.jsonb_strip_nulls(q.settings OPERATOR(pg_catalog.||) $2)
RETURNING q.settings"
);

/// Changes settings of a queue with this transaction, and returns all that its row says.
///
/// * `changes` - null: the row shall not say it any more
pub fn configure(name: &str, changes: &Value) -> Result<Value> {
    let (db, _) = ensure_loaded(name)?;
    dispatch::reserve_log(1)?;
    let stored = spi::as_owner(|spi| {
        let args = [spi::Arg::of(name), spi::Arg::jsonb(Some(changes.clone().to_datum()))];
        spi.query_one(CONFIGURE, &args, |row| Ok(row.json(1)))
    })?;
    note_change(db, name)?;
    Ok(stored.flatten().unwrap_or(Value::Null))
}

/// How long each queue that has a row keeps failed and cancelled jobs; see
/// `settings::failed_retention`.
pub fn failed_retentions() -> Result<HashMap<String, Option<i64>>> {
    retentions(settings::failed_retention)
}

/// The same of completed ones.
pub fn completed_retentions() -> Result<HashMap<String, Option<i64>>> {
    retentions(settings::completed_retention)
}

fn retentions(own: fn(&Value) -> Option<i64>) -> Result<HashMap<String, Option<i64>>> {
    let mut kept = HashMap::new();
    let table = Table::open(catalog::relation("queues")?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        let own = row.json(2).as_ref().and_then(own);
        if let Some(queue) = row.text(1) {
            kept.insert(queue, own);
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(kept)
}

/// Memory reads the row again once this transaction has committed.
fn note_change(db: Db, name: &str) -> Result<()> {
    let subxact = xact::current_subxact();
    dispatch::with(|d| {
        let queue = d.ensure_queue(db, name)?;
        dispatch::log_act(d, db, subxact, Act::Configure { queue });
        Ok(())
    })
    .map_err(dispatch::capacity)
}

/// Pauses or resumes a queue with this transaction; false when it was so already.
pub fn set_paused(name: &str, paused: bool, by: Option<&str>) -> Result<bool> {
    let (db, _) = ensure_loaded(name)?;
    dispatch::reserve_log(2)?;
    if !paused {
        ensure_exists(name)?;
    }
    let is_copy = identity::is_copy()?;
    let changed = spi::as_owner(|spi| {
        if paused {
            return spi.execute(PAUSE, &[spi::Arg::of(name), spi::Arg::opt(by)]);
        }
        if is_copy {
            // Without a row it would be paused again.
            spi.execute(CREATE, &[spi::Arg::of(name)])?;
        }
        spi.execute(RESUME, &[spi::Arg::of(name)])
    })?;
    let subxact = xact::current_subxact();
    let noted = dispatch::with(|d: &mut Dispatcher<'_>| {
        let queue = d.ensure_queue(db, name)?;
        dispatch::log_act(d, db, subxact, Act::Pause { queue, paused });
        dispatch::log_act(d, db, subxact, Act::Configure { queue });
        Ok(())
    });
    noted.map_err(dispatch::capacity)?;
    Ok(changed > 0)
}

/// P0002 for a queue that nobody has made or used.
pub fn ensure_exists(name: &str) -> Result<()> {
    if read(name)?.is_none() && !is_used(dispatch::attach()?, name)? {
        return Err(Error::new(SqlState::NOT_FOUND, format!("queue \"{name}\" does not exist")));
    }
    Ok(())
}

/// Whether a job was ever enqueued to it.
fn is_used(db: Db, name: &str) -> Result<bool> {
    let in_memory = dispatch::with(|d| {
        let queue = d.queue(db, name).map(|at| &d.queues[at]);
        queue.is_some_and(|q| q.lanes != NIL || q.counts != Counts::default())
    });
    Ok(in_memory || lanes::exists(name)? || changes::exist(name)?)
}

const ADD_TOTALS: &str = concat!(
    "
INSERT INTO awa.queues AS q (queue, settings, paused_at, created_at,
                             completed_total, failed_total, cancelled_total)
SELECT n.queue, '{}', ",
    paused_from_the_start!(),
    ", pg_catalog.clock_timestamp(), n.completed, n.failed, n.cancelled
FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3),
                pg_catalog.unnest($4)) AS n (queue, completed, failed, cancelled)
ON CONFLICT (queue) DO UPDATE SET
    completed_total = q.completed_total OPERATOR(pg_catalog.+) EXCLUDED.completed_total,
    failed_total = q.failed_total OPERATOR(pg_catalog.+) EXCLUDED.failed_total,
    cancelled_total = q.cancelled_total OPERATOR(pg_catalog.+) EXCLUDED.cancelled_total"
);

/// Adds ends to the totals of queues.
pub fn add_totals(ends: &BTreeMap<String, Ends>) -> Result<()> {
    use spi::Arg;
    let names: Vec<&str> = ends.keys().map(String::as_str).collect();
    let column = |of: fn(&Ends) -> i64| ends.values().map(of).collect::<Vec<i64>>();
    spi::as_owner(|spi| {
        let args = [
            Arg::text_array(&names),
            Arg::bigint_array(&column(|e| e.completed)),
            Arg::bigint_array(&column(|e| e.failed)),
            Arg::bigint_array(&column(|e| e.cancelled)),
        ];
        spi.execute(ADD_TOTALS, &args).map(|_| ())
    })
}

/// Queues whose rows an open transaction of somebody else writes: who writes them too would
/// have to wait.
pub fn read_held() -> Result<HashSet<String>> {
    let others = read_pending()?.into_iter().filter(|(xid, _)| !xact::is_current(*xid));
    Ok(others.map(|(_, queue)| queue).collect())
}

pub struct Totals {
    pub queue: String,
    pub paused: bool,
    pub ends: Ends,
}

/// Queues whose rows an open transaction writes, with its xid.
pub fn read_pending() -> Result<BTreeSet<(u32, String)>> {
    let mut pending = BTreeSet::new();
    let table = Table::open(catalog::relation("queues")?, LockMode::AccessShare);
    table.scan(Snapshot::Any, |row| {
        let writer = Some(row.fate());
        for fate in [writer, row.deleter()].into_iter().flatten() {
            if let Fate::InProgress(xid) = fate {
                pending.insert((xid, row.text(1).unwrap_or_default()));
            }
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(pending)
}

/// What the rows of queues say, of every queue that has one.
pub fn read_totals() -> Result<Vec<Totals>> {
    let mut totals = Vec::new();
    let table = Table::open(catalog::relation("queues")?, LockMode::AccessShare);
    table.scan(Snapshot::Latest, |row| {
        totals.push(Totals {
            queue: row.text(1).unwrap_or_default(),
            paused: row.micros(3).is_some(),
            ends: Ends {
                completed: row.i64(6).unwrap_or(0),
                failed: row.i64(7).unwrap_or(0),
                cancelled: row.i64(8).unwrap_or(0),
            },
        });
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(totals)
}
