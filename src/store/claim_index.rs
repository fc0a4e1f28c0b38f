//! The index by which point reads find the claims of one job, on leaves where it is worth its
//! WAL: hundreds of thousands of claims of single jobs are a long way to read otherwise.
//!
//! An index is what it is on, whatever it is called and whoever made it. The one that is made
//! here has a name of its own, so that it can be told from a user's when its segment is used
//! again.

use super::claims::column::JOB_IDS;
use crate::error::Result;
use crate::pg::catalog::{self, Leaf};
use crate::pg::heap::Table;
use crate::pg::lock::{self, LockMode};
use crate::pg::role;
use crate::pg::spi::{self, Spi};

/// How a segment stands after it was asked to have the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// It was there.
    Present,
    Made,
    /// Something else has its name.
    Taken,
    /// Somebody writes claims of the segment, or works on its table.
    Busy,
}

pub fn name(segment: u8) -> String {
    format!("lease_claim_batches_{segment}_job_ids")
}

fn is_indexed(leaf: u32) -> bool {
    let table = Table::open(leaf, LockMode::AccessShare);
    let found = table.array_index(JOB_IDS).is_some();
    table.close_release_lock();
    found
}

/// Makes the index unless there is one. Waits for nobody, and nobody who claims a job waits
/// for it to begin; while it is built, claims of the segment's own jobs would.
pub fn ensure(segment: u8) -> Result<Found> {
    let leaf = catalog::leaf(Leaf::Claims, segment)?;
    if is_indexed(leaf) {
        return Ok(Found::Present);
    }
    let name = name(segment);
    if catalog::is_taken(&name)? {
        return Ok(Found::Taken);
    }
    // CREATE INDEX would be content with less, but two of them must not meet.
    if !lock::lock_conditional(leaf, LockMode::ShareRowExclusive) {
        return Ok(Found::Busy);
    }
    if is_indexed(leaf) {
        return Ok(Found::Present);
    }
    // Entries go in at once: a list of pending ones would be left for some claim to clear up.
    spi::as_owner(|spi| {
        spi.command(&format!(
            "CREATE INDEX {name} ON awa.lease_claim_batches_{segment} \
             USING gin (job_ids pg_catalog.array_ops) WITH (fastupdate = off)"
        ))
    })?;
    Ok(Found::Made)
}

/// Drops the index, if it is one of ours, from a segment that is empty and about to be written
/// to: it would cost each claim more than it ever saves. Where a lock would have to be waited
/// for, it stays, and claims maintain it.
pub fn drop_own(segment: u8) -> Result<()> {
    let leaf = catalog::leaf(Leaf::Claims, segment)?;
    let name = name(segment);
    if !catalog::is_taken(&name)? || !lock::lock_conditional(leaf, LockMode::AccessExclusive) {
        return Ok(());
    }
    let table = Table::open(leaf, LockMode::AccessShare);
    let ours = table.array_index(JOB_IDS).is_some_and(|index| catalog::is_named(index, &name));
    table.close_release_lock();
    if ours {
        spi::as_owner(|spi| spi.command(&format!("DROP INDEX awa.{name}")))?;
    }
    Ok(())
}

const GRANTEES: &str = "
WITH wanted AS (
    SELECT DISTINCT a.grantee
    FROM pg_catalog.pg_class AS c, LATERAL pg_catalog.aclexplode(
        coalesce(c.relacl, pg_catalog.acldefault('r', c.relowner))) AS a
    WHERE c.relnamespace OPERATOR(pg_catalog.=) 'awa'::pg_catalog.regnamespace
      AND c.relkind OPERATOR(pg_catalog.=) 'r'
      AND c.relname OPERATOR(pg_catalog.~) '^lease_claim_batches_[0-9]+$'
      AND a.privilege_type OPERATOR(pg_catalog.=) 'TRUNCATE'
      AND a.grantee OPERATOR(pg_catalog.<>) 0
), present AS (
    SELECT DISTINCT a.grantee
    FROM pg_catalog.pg_proc AS p, LATERAL pg_catalog.aclexplode(
        coalesce(p.proacl, pg_catalog.acldefault('f', p.proowner))) AS a
    WHERE p.oid OPERATOR(pg_catalog.=)
        'awa.ensure_claim_batch_job_index(pg_catalog.int4)'::pg_catalog.regprocedure
)
SELECT coalesce(w.grantee, p.grantee)::pg_catalog.int8, w.grantee IS NOT NULL
FROM wanted AS w FULL JOIN present AS p ON p.grantee OPERATOR(pg_catalog.=) w.grantee
WHERE w.grantee IS NULL OR p.grantee IS NULL";

const FUNCTION: &str = "FUNCTION awa.ensure_claim_batch_job_index(int)";

/// Lets exactly those roles call `ensure_claim_batch_job_index` that may truncate a leaf of
/// claims, and never PUBLIC. As the owner of all of them, whoever asks. Returns how many changed.
pub fn refresh_execute() -> Result<u64> {
    spi::as_owner(|spi| {
        let changes = spi
            .query(GRANTEES, &[])?
            .collect(|row| Ok((row.i64(1).unwrap_or(0) as u32, row.bool(2).unwrap_or(false))))?;
        for (grantee, wanted) in &changes {
            change_execute(spi, *grantee, *wanted)?;
        }
        Ok(changes.len() as u64)
    })
}

fn change_execute(spi: &Spi, grantee: u32, wanted: bool) -> Result<()> {
    let name = match grantee {
        0 => Some("PUBLIC".to_owned()),
        role => role::quoted(role),
    };
    // Dropped meanwhile.
    let Some(name) = name else { return Ok(()) };
    spi.command(&match wanted {
        true => format!("GRANT EXECUTE ON {FUNCTION} TO {name}"),
        false => format!("REVOKE ALL ON {FUNCTION} FROM {name} CASCADE"),
    })
}
