//! Which database this is: tells a copy made by CREATE DATABASE ... TEMPLATE from its source.
//!
//! The row is written by the worker and not dumped. Where there is none, the database is new
//! or was restored from a dump. Where it names another system, pg_upgrade brought it here.
//! Where it names this system and another database, it was copied: its jobs are still those
//! of its source, so nothing of it may run before somebody says so.

use crate::error::Result;
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::spi::{self, Arg};
use crate::pg::{catalog, database};

#[derive(Clone, Copy)]
struct Identity {
    system: i64,
    database: u32,
    is_copy: bool,
}

fn read() -> Result<Option<Identity>> {
    let mut found = None;
    let table = Table::open(catalog::relation("identity")?, LockMode::AccessShare);
    // Not SelfNow: the row may move while we look.
    table.scan(Snapshot::Latest, |row| {
        found = Some(Identity {
            system: row.i64(1).unwrap_or(0),
            database: row.oid(2).unwrap_or(0),
            is_copy: !row.is_null(3),
        });
        Ok(false)
    })?;
    table.close_release_lock();
    Ok(found)
}

/// Whether this database is a copy. There, a queue without a row is paused.
pub fn is_copy() -> Result<bool> {
    Ok(read()?.is_some_and(|identity| identity.is_copy))
}

/// What the worker found out and wrote down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settled {
    AsBefore,
    /// This is a copy that was never served: its queues were paused.
    Copied {
        source: String,
    },
}

const INSERT: &str = "
INSERT INTO awa.identity (system_identifier, database)
VALUES ($1, $2::pg_catalog.int8::pg_catalog.oid)";

const MOVE: &str = "
UPDATE awa.identity
SET system_identifier = $1, database = $2::pg_catalog.int8::pg_catalog.oid";

const COPY: &str = "
UPDATE awa.identity
SET copied_from = database, database = $1::pg_catalog.int8::pg_catalog.oid";

const PAUSE: &str = "
UPDATE awa.queues SET paused_at = pg_catalog.clock_timestamp(), paused_by = $1
WHERE paused_at IS NULL";

/// Writes down which database this is, and pauses all queues of a copy.
pub fn settle() -> Result<Settled> {
    let system = database::system_identifier();
    let here = database::this_database();
    let place = [Arg::of(system), Arg::of(i64::from(here))];
    match read()? {
        Some(known) if known.system == system && known.database == here => Ok(Settled::AsBefore),
        None => {
            spi::as_owner(|spi| spi.execute(INSERT, &place))?;
            Ok(Settled::AsBefore)
        }
        Some(known) if known.system != system => {
            spi::as_owner(|spi| spi.execute(MOVE, &place))?;
            Ok(Settled::AsBefore)
        }
        Some(known) => {
            let source = match database::name_of(known.database) {
                Some(name) => format!("database \"{name}\""),
                None => format!("a database that is gone (OID {})", known.database),
            };
            spi::as_owner(|spi| {
                spi.execute(COPY, &[Arg::of(i64::from(here))])?;
                spi.execute(PAUSE, &[Arg::of(format!("copy of {source}").as_str())])
            })?;
            Ok(Settled::Copied { source })
        }
    }
}
