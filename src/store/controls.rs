//! What operators have stopped, durably.

use crate::error::Result;
use crate::pg::datum::Uuid;
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::spi::Arg;
use crate::pg::{catalog, lock, spi};

/// Rotation, truncation and everything else that removes what ended.
pub const PRUNE: &str = "maintenance.prune";

#[derive(Clone, Debug)]
pub struct Halt {
    pub id: Uuid,
    pub reason: Option<String>,
    pub halted_by: String,
    pub since: i64,
}

/// The halt of a scope, as it is now; None: it runs.
pub fn read(scope: &str) -> Result<Option<Halt>> {
    let mut found = None;
    let table = Table::open(catalog::relation("runtime_controls")?, LockMode::AccessShare);
    table.index_text(
        catalog::relation("runtime_controls_pkey")?,
        scope,
        Snapshot::Latest,
        |row| {
            found = row.uuid(2).map(|id| Halt {
                id,
                reason: row.text(4),
                halted_by: row.text(5).unwrap_or_default(),
                since: row.micros(6).unwrap_or(0),
            });
            Ok(false)
        },
    )?;
    table.close_release_lock();
    Ok(found)
}

const HALT: &str = "
INSERT INTO awa.runtime_controls AS c (scope, halt_id, mode, reason, halted_by, since)
VALUES ($1, $2, $3, $4, SESSION_USER, pg_catalog.clock_timestamp())
ON CONFLICT (scope) DO UPDATE SET halt_id = EXCLUDED.halt_id, mode = EXCLUDED.mode,
    reason = EXCLUDED.reason, halted_by = EXCLUDED.halted_by, since = EXCLUDED.since";

/// Halts the scope; a halt that is there is replaced.
pub fn halt(scope: &str, id: Uuid, mode: &str, reason: Option<&str>) -> Result<()> {
    let args = [Arg::of(scope), Arg::of(id), Arg::of(mode), Arg::opt(reason)];
    spi::as_owner(|spi| spi.execute(HALT, &args).map(|_| ()))
}

const RESUME: &str = "
DELETE FROM awa.runtime_controls
WHERE scope OPERATOR(pg_catalog.=) $1 AND halt_id OPERATOR(pg_catalog.=) $2";

/// False, and nothing changed, unless this is the halt in force.
pub fn resume(scope: &str, id: Uuid) -> Result<bool> {
    let args = [Arg::of(scope), Arg::of(id)];
    Ok(spi::as_owner(|spi| spi.execute(RESUME, &args))? > 0)
}

/// Begins steps of `PRUNE`, until the transaction ends; false while another session is in one.
pub fn try_enter() -> Result<bool> {
    Ok(lock::try_hold_key(catalog::relation("runtime_controls")?, 0))
}

/// Whether no session is in a step of `PRUNE`.
pub fn is_quiet() -> Result<bool> {
    Ok(lock::is_key_free(catalog::relation("runtime_controls")?, 0))
}
