//! Lanes: which queue, priority and shard a lane id in a body stands for.

use std::collections::HashMap;

use crate::error::Result;
use crate::pg::catalog;
use crate::pg::datum::{Datum, ToDatum};
use crate::pg::heap::{Fate, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LaneRow {
    pub queue: String,
    pub priority: u8,
    pub shard: u8,
    /// Its row is committed.
    pub durable: bool,
}

/// The id of a lane, if a committed row (or one of this transaction) names it.
///
/// Read with the table as it is now, whatever the isolation level: a lane is the same for
/// every transaction, and a serializable one must not conflict over it.
pub fn find(queue: &str, priority: u8, shard: u8) -> Result<Option<i64>> {
    let mut found: Option<i64> = None;
    let table = Table::open(catalog::relation("queue_lanes")?, LockMode::AccessShare);
    table.index_text(catalog::relation("queue_lanes_queue")?, queue, Snapshot::SelfNow, |row| {
        if row.i16(2) == Some(i16::from(priority)) && row.i16(3) == Some(i16::from(shard)) {
            // The oldest, should there be several.
            found = found.into_iter().chain(row.i64(1)).min();
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(found)
}

/// Whether the queue has a lane, of any priority.
pub fn exists(queue: &str) -> Result<bool> {
    let mut found = false;
    let table = Table::open(catalog::relation("queue_lanes")?, LockMode::AccessShare);
    table.index_text(catalog::relation("queue_lanes_queue")?, queue, Snapshot::SelfNow, |_| {
        found = true;
        Ok(false)
    })?;
    table.close_release_lock();
    Ok(found)
}

/// Writes the row of a lane that is not known to be durable.
pub fn write(id: i64, queue: &str, priority: u8, shard: u8) -> Result<()> {
    let table = Table::open(catalog::relation("queue_lanes")?, LockMode::RowExclusive);
    let row: [Option<Datum>; 4] = [
        Some(id.to_datum()),
        Some(i16::from(priority).to_datum()),
        Some(i16::from(shard).to_datum()),
        Some(queue.to_datum()),
    ];
    table.insert(&row)?;
    table.close_keep_lock();
    Ok(())
}

/// Every lane by its id.
pub fn read_all(snapshot: Snapshot) -> Result<HashMap<i64, LaneRow>> {
    let mut lanes = HashMap::new();
    let table = Table::open(catalog::relation("queue_lanes")?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        let (Some(id), Some(priority), Some(shard), Some(queue)) =
            (row.i64(1), row.i16(2), row.i16(3), row.text(4))
        else {
            return Ok(true);
        };
        let durable = match snapshot {
            Snapshot::Any => match row.fate() {
                Fate::Committed => true,
                Fate::InProgress(_) => false,
                // Whoever else used the lane wrote a row of its own.
                Fate::Aborted => return Ok(true),
            },
            _ => true,
        };
        let known = lanes.get(&id).is_some_and(|lane: &LaneRow| lane.durable);
        let (priority, shard, durable) = (priority as u8, shard as u8, durable || known);
        lanes.insert(id, LaneRow { queue, priority, shard, durable });
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(lanes)
}
