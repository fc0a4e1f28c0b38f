//! Receipt epochs: committed and flushed before their first receipt leaves the server.

use crate::domain::receipt;
use crate::error::{Error, Result};
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::{catalog, spi};

/// The last epoch that was committed.
pub fn last() -> Result<Option<i64>> {
    let mut last = None;
    let table = Table::open(catalog::relation("boot_epochs")?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        last = last.max(row.i64(1));
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(last)
}

const INSERT: &str = "
INSERT INTO awa.boot_epochs (epoch, started_at) VALUES ($1, pg_catalog.clock_timestamp())";

/// Of older epochs only the last says anything; a few are kept for the eye.
const TRIM: &str = "DELETE FROM awa.boot_epochs WHERE epoch OPERATOR(pg_catalog.<)
    (SELECT pg_catalog.min(epoch) FROM (SELECT epoch FROM awa.boot_epochs
        ORDER BY epoch DESC LIMIT 16) AS kept)";

/// Writes the next epoch; the caller commits and flushes before it uses the receipts,
/// which it gets as first and end.
pub fn write_next(now: i64) -> Result<(i64, i64)> {
    let epoch = receipt::next_epoch(last()?, now)
        .ok_or_else(|| Error::internal("the receipts are used up"))?;
    spi::as_owner(|spi| {
        spi.execute(INSERT, &[spi::Arg::of(epoch)])?;
        spi.execute(TRIM, &[]).map(|_| ())
    })?;
    let first = receipt::first_of(epoch);
    Ok((first, first + receipt::PER_EPOCH))
}
