//! The rows of registered runtimes.

use crate::error::Result;
use crate::pg::datum::Interval;
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::{catalog, spi};

pub struct NewRuntime<'a> {
    pub id: [u8; 16],
    pub name: Option<&'a str>,
    pub heartbeat: bool,
    /// Microseconds.
    pub timeout: i64,
    pub pid: i32,
    pub opts: &'a str,
}

const INSERT: &str = "
INSERT INTO awa.runtime_instances (runtime, name, liveness, heartbeat_timeout, host, pid,
    client_addr, registered_at, registered_by, opts)
VALUES ($1, $2, $3, $4, NULL, $5, pg_catalog.inet_client_addr(), pg_catalog.clock_timestamp(),
    $6::pg_catalog.oid, $7::pg_catalog.jsonb)";

pub fn write(runtime: &NewRuntime<'_>, user: u32) -> Result<()> {
    use spi::Arg;
    let liveness = if runtime.heartbeat { "heartbeat" } else { "session" };
    let args = [
        Arg::of(runtime.id),
        Arg::opt(runtime.name),
        Arg::of(liveness),
        Arg::opt(runtime.heartbeat.then_some(Interval::of_micros(runtime.timeout))),
        Arg::of(runtime.pid),
        Arg::of(i64::from(user)),
        Arg::of(runtime.opts),
    ];
    spi::as_owner(|spi| spi.execute(INSERT, &args).map(|_| ()))
}

/// The role that registered the runtime.
pub fn registered_by(id: [u8; 16]) -> Result<Option<u32>> {
    spi::as_owner(|spi| {
        spi.query_one(REGISTERED_BY, &[spi::Arg::of(id)], |row| Ok(row.i64(1)))
            .map(|found| found.flatten().and_then(|oid| u32::try_from(oid).ok()))
    })
}

const REGISTERED_BY: &str = "
SELECT registered_by::pg_catalog.oid::pg_catalog.int8 FROM awa.runtime_instances
WHERE runtime OPERATOR(pg_catalog.=) $1";

const DELETE: &str = "DELETE FROM awa.runtime_instances WHERE runtime OPERATOR(pg_catalog.=) $1";

pub fn delete(id: [u8; 16]) -> Result<()> {
    spi::as_owner(|spi| spi.execute(DELETE, &[spi::Arg::of(id)]).map(|_| ()))
}

/// Heartbeat runtimes, which outlive a restart: their ids and timeouts (microseconds).
pub fn read_heartbeats() -> Result<Vec<([u8; 16], i64)>> {
    let mut found = Vec::new();
    let table = Table::open(catalog::relation("runtime_instances")?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        if row.text(3).as_deref() == Some("heartbeat")
            && let (Some(id), Some(timeout)) = (row.uuid(1), row.interval(4))
        {
            found.push((id, timeout.to_micros()));
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(found)
}
