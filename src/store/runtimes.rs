//! The rows of runtimes: of those that live, and of those that ended a while ago.

use crate::error::Result;
use crate::pg::datum::{Interval, Timestamp, Uuid};
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::spi::Arg;
use crate::pg::{catalog, spi};

pub struct NewRuntime<'a> {
    pub id: Uuid,
    pub name: Option<&'a str>,
    pub heartbeat: bool,
    /// Microseconds.
    pub timeout: i64,
    /// What the client says; by default where it connects from.
    pub host: Option<&'a str>,
    pub pid: i32,
    pub opts: &'a str,
}

const INSERT: &str = "
INSERT INTO awa.runtimes (runtime, name, liveness, heartbeat_timeout, host, pid,
    client_addr, registered_at, registered_by, opts)
VALUES ($1, $2, $3, $4,
    coalesce($5, pg_catalog.host(pg_catalog.inet_client_addr()), '[local]'), $6,
    pg_catalog.inet_client_addr(), pg_catalog.clock_timestamp(),
    $7::pg_catalog.oid, $8::pg_catalog.jsonb)";

pub fn write(runtime: &NewRuntime<'_>, user: u32) -> Result<()> {
    let liveness = if runtime.heartbeat { "heartbeat" } else { "session" };
    let args = [
        Arg::of(runtime.id),
        Arg::opt(runtime.name),
        Arg::of(liveness),
        Arg::opt(runtime.heartbeat.then_some(Interval::of_micros(runtime.timeout))),
        Arg::opt(runtime.host),
        Arg::of(runtime.pid),
        Arg::of(i64::from(user)),
        Arg::of(runtime.opts),
    ];
    spi::as_owner(|spi| spi.execute(INSERT, &args).map(|_| ()))
}

const REGISTERED_BY: &str = "
SELECT registered_by::pg_catalog.oid::pg_catalog.int8 FROM awa.runtimes
WHERE runtime OPERATOR(pg_catalog.=) $1";

/// The role that registered the runtime.
pub fn registered_by(id: Uuid) -> Result<Option<u32>> {
    spi::as_owner(|spi| {
        spi.query_one(REGISTERED_BY, &[Arg::of(id)], |row| Ok(row.i64(1)))
            .map(|found| found.flatten().and_then(|oid| u32::try_from(oid).ok()))
    })
}

const LIVING: &str = "SELECT runtime FROM awa.runtimes WHERE ended_at IS NULL";

/// Those that have not ended, as far as the rows say.
pub fn read_living() -> Result<Vec<Uuid>> {
    spi::as_owner(|spi| spi.query(LIVING, &[])?.collect(|row| Ok(row.uuid(1))))
        .map(|found| found.into_iter().flatten().collect())
}

const END: &str = "
UPDATE awa.runtimes SET ended_at = pg_catalog.clock_timestamp()
WHERE runtime OPERATOR(pg_catalog.=) (
    SELECT runtime FROM awa.runtimes WHERE runtime OPERATOR(pg_catalog.=) $1 AND ended_at IS NULL
    FOR UPDATE SKIP LOCKED)";

/// Writes down that they have ended; how many. Another transaction may be at it, and is not
/// waited for.
pub fn end(ids: &[Uuid]) -> Result<u64> {
    spi::as_owner(|spi| {
        ids.iter().try_fold(0, |done, id| Ok(done + spi.execute(END, &[Arg::of(*id)])?))
    })
}

const FORGET: &str = "
DELETE FROM awa.runtimes WHERE runtime OPERATOR(pg_catalog.=) ANY (ARRAY(
    SELECT runtime FROM awa.runtimes WHERE ended_at OPERATOR(pg_catalog.<=) $1
    ORDER BY ended_at LIMIT $2 FOR UPDATE SKIP LOCKED))";

/// Removes up to `limit` of those that ended before a time; how many.
pub fn forget_until(until: i64, limit: i64) -> Result<u64> {
    let args = [Arg::of(Timestamp(until)), Arg::of(limit)];
    spi::as_owner(|spi| spi.execute(FORGET, &args))
}

/// Heartbeat runtimes, which outlive a restart: their ids and timeouts (microseconds).
pub fn read_heartbeats() -> Result<Vec<(Uuid, i64)>> {
    let mut found = Vec::new();
    let table = Table::open(catalog::relation("runtimes")?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        if row.text(3).as_deref() == Some("heartbeat")
            && row.is_null(11)
            && let (Some(id), Some(timeout)) = (row.uuid(1), row.interval(4))
        {
            found.push((id, timeout.to_micros()));
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(found)
}
