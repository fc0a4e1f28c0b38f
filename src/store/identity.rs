//! Which database this is: tells a copy made by CREATE DATABASE ... TEMPLATE from its source.
//!
//! The row is written by the worker and not dumped. Where there is none, the database is new
//! or was restored from a dump. Where it names another system, pg_upgrade brought it here.
//! Where it names this system and another database, it was copied: its jobs are still those
//! of its source, so nothing of it may run before somebody says so.
//!
//! The row also says which receipts were issued here. Attempts with older ones came with a
//! dump or a copy: whoever works on them works for the other database.

use crate::domain::receipt;
use crate::error::{Error, Result};
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::spi::{self, Arg};
use crate::pg::{catalog, database, xact};
use crate::store::epochs;

#[derive(Clone, Copy)]
struct Identity {
    system: i64,
    database: u32,
    first_receipt: i64,
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
            first_receipt: row.i64(3).unwrap_or(0),
            is_copy: !row.is_null(4),
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
#[derive(Clone, Debug)]
pub struct Settled {
    /// Older ones were issued by another database.
    pub first_receipt: i64,
    /// This is a copy that was never served, of that database: its queues were paused.
    pub copied_from: Option<String>,
}

const INSERT: &str = "
INSERT INTO awa.identity (system_identifier, database, first_receipt)
VALUES ($1, $2::pg_catalog.int8::pg_catalog.oid, $3)";

const MOVE: &str = "
UPDATE awa.identity
SET system_identifier = $1, database = $2::pg_catalog.int8::pg_catalog.oid";

const COPY: &str = "
UPDATE awa.identity
SET copied_from = database, database = $1::pg_catalog.int8::pg_catalog.oid, first_receipt = $2";

const PAUSE: &str = "
UPDATE awa.queues SET paused_at = pg_catalog.clock_timestamp(), paused_by = $1
WHERE paused_at IS NULL";

/// Writes down which database this is, and pauses all queues of a copy.
pub fn settle() -> Result<Settled> {
    let system = database::system_identifier();
    let here = database::this_database();
    let epoch = receipt::next_epoch(epochs::last()?, xact::micros())
        .ok_or_else(|| Error::internal("the receipts are used up"))?;
    // The replay that asks will write this epoch, or a later one.
    let next_receipt = receipt::first_of(epoch);
    let settled = |first_receipt| Settled { first_receipt, copied_from: None };
    match read()? {
        Some(known) if known.system == system && known.database == here => {
            Ok(settled(known.first_receipt))
        }
        None => {
            let row = [Arg::of(system), Arg::of(i64::from(here)), Arg::of(next_receipt)];
            spi::as_owner(|spi| spi.execute(INSERT, &row))?;
            Ok(settled(next_receipt))
        }
        Some(known) if known.system != system => {
            let place = [Arg::of(system), Arg::of(i64::from(here))];
            spi::as_owner(|spi| spi.execute(MOVE, &place))?;
            Ok(settled(known.first_receipt))
        }
        Some(known) => {
            let source = match database::name_of(known.database) {
                Some(name) => format!("database \"{name}\""),
                None => format!("a database that is gone (OID {})", known.database),
            };
            spi::as_owner(|spi| {
                spi.execute(COPY, &[Arg::of(i64::from(here)), Arg::of(next_receipt)])?;
                spi.execute(PAUSE, &[Arg::of(format!("copy of {source}").as_str())])
            })?;
            Ok(Settled { first_receipt: next_receipt, copied_from: Some(source) })
        }
    }
}
