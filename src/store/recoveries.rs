//! Which recoveries ran.

use crate::domain::name;
use crate::error::Result;
use crate::pg::spi::Arg;
use crate::pg::{lock, spi};

const INSERT: &str = "
INSERT INTO awa.recovery_epochs (namespace, epoch, ran_at)
VALUES ($1, $2, pg_catalog.clock_timestamp())
ON CONFLICT DO NOTHING";

/// Makes the recovery of an epoch this transaction's; false when another one ran it, or is
/// running it.
pub fn begin(namespace: &str, epoch: &str) -> Result<bool> {
    // Who runs it holds this: others need not wait to hear how it ends.
    let hash = name::hash(&format!("{namespace}\0{epoch}"));
    if !lock::try_hold_epoch(hash) {
        return Ok(false);
    }
    let args = [Arg::of(namespace), Arg::of(epoch)];
    Ok(spi::as_owner(|spi| spi.execute(INSERT, &args))? > 0)
}
