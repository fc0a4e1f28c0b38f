//! Chunk numbers.

use crate::domain::entities::{SEGMENTS, position};
use crate::error::Result;
use crate::pg::catalog::{self, Leaf, LeafIndex};
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::sequence;
use crate::pg::snapshot::Snapshot;

/// Numbers in one value of the sequence: one WAL record of it serves 32 million jobs.
const BLOCK: i64 = 1024;

/// Chunk numbers nobody used, in this or any earlier life of the database: the first, and
/// how many.
pub fn next_block() -> Result<(i64, i64)> {
    let value = sequence::next_value(catalog::relation("chunk_blocks")?);
    Ok((value * BLOCK, BLOCK))
}

/// A block above every number that a row has, for a floor of replay. A restore loads rows
/// whose numbers the sequence may not have reached, or sets it back below our own.
pub fn fresh_block() -> Result<(i64, i64)> {
    loop {
        let block = next_block()?;
        if !is_used(block.0)? {
            return Ok(block);
        }
    }
}

/// Whether a row, committed or not, has this number or a later one.
fn is_used(number: i64) -> Result<bool> {
    let first = position(number, 0);
    for segment in 0..SEGMENTS as u8 {
        let table = catalog::leaf(Leaf::Ready, segment)?;
        for index in [LeafIndex::Position, LeafIndex::JobId] {
            if any_from(table, catalog::leaf_index(index, segment)?, first)? {
                return Ok(true);
            }
        }
    }
    for (table, index, first) in [
        ("deferred_jobs", "deferred_jobs_pkey", first),
        ("done_entries", "done_entries_pkey", first),
        ("dlq_entries", "dlq_entries_pkey", first),
        ("completed_entries", "completed_entries_pkey", first),
        // Lanes get their ids from the same numbers.
        ("queue_lanes", "queue_lanes_lane_id", number),
    ] {
        if any_from(catalog::relation(table)?, catalog::relation(index)?, first)? {
            return Ok(true);
        }
    }
    Ok(false)
}

fn any_from(table: u32, index: u32, first: i64) -> Result<bool> {
    let mut any = false;
    let table = Table::open(table, LockMode::AccessShare);
    table.index_range(index, first, i64::MAX, Snapshot::Any, |_| {
        any = true;
        Ok(false)
    })?;
    table.close_release_lock();
    Ok(any)
}
