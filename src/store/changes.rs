//! What transactions add to the counts of queues that no segment tells: a row each, so that
//! nobody waits for anybody; the worker sums them up.

use std::collections::BTreeMap;

use crate::error::Result;
use crate::pg::spi::{self, Arg};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Change {
    /// Dead letters that came; less than zero: that went.
    pub letters: i64,
    /// Jobs that were cancelled while they were in no segment.
    pub cancelled: i64,
}

const ADD: &str = "
INSERT INTO awa.queue_changes (queue, letters, cancelled)
SELECT queue, letters, cancelled
FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3))
     AS n (queue, letters, cancelled)";

/// Adds to the counts of queues, at the commit.
pub fn add(changes: &BTreeMap<&str, Change>) -> Result<()> {
    if changes.is_empty() {
        return Ok(());
    }
    let names: Vec<&str> = changes.keys().copied().collect();
    let column = |of: fn(&Change) -> i64| changes.values().map(of).collect::<Vec<i64>>();
    let (letters, cancelled) = (column(|c| c.letters), column(|c| c.cancelled));
    let args =
        [Arg::text_array(&names), Arg::bigint_array(&letters), Arg::bigint_array(&cancelled)];
    spi::as_owner(|spi| spi.execute(ADD, &args).map(|_| ()))
}

const SUMS: &str = "
SELECT queue, pg_catalog.sum(letters)::pg_catalog.int8, pg_catalog.sum(cancelled)::pg_catalog.int8
FROM awa.queue_changes GROUP BY queue";

/// The sums of all changes, by queue.
pub fn read() -> Result<Vec<(String, Change)>> {
    spi::as_owner(|spi| {
        spi.query(SUMS, &[])?.collect(|row| {
            let (letters, cancelled) = (row.i64(2).unwrap_or(0), row.i64(3).unwrap_or(0));
            Ok((row.text(1).unwrap_or_default(), Change { letters, cancelled }))
        })
    })
}

const EXIST: &str = "
SELECT EXISTS (SELECT FROM awa.queue_changes WHERE queue OPERATOR(pg_catalog.=) $1)";

/// Whether there is one of a queue.
pub fn exist(queue: &str) -> Result<bool> {
    let found =
        spi::as_owner(|spi| spi.query_one(EXIST, &[Arg::of(queue)], |row| Ok(row.bool(1))))?;
    Ok(found.flatten().unwrap_or(false))
}

/// One row a queue again, when there are many; who writes is not waited for.
const FOLD: &str = "
WITH gone AS (
    DELETE FROM awa.queue_changes WHERE change OPERATOR(pg_catalog.=) ANY (ARRAY(
        SELECT change FROM awa.queue_changes
        WHERE (SELECT pg_catalog.count(*) OPERATOR(pg_catalog.-) pg_catalog.count(DISTINCT queue)
               FROM awa.queue_changes) OPERATOR(pg_catalog.>) 100
        LIMIT 10000 FOR UPDATE SKIP LOCKED))
    RETURNING queue, letters, cancelled)
INSERT INTO awa.queue_changes (queue, letters, cancelled)
SELECT queue, pg_catalog.sum(letters)::pg_catalog.int8, pg_catalog.sum(cancelled)::pg_catalog.int8
FROM gone GROUP BY queue
HAVING pg_catalog.sum(letters) OPERATOR(pg_catalog.<>) 0
    OR pg_catalog.sum(cancelled) OPERATOR(pg_catalog.<>) 0";

/// Sums the counts up.
pub fn fold() -> Result<()> {
    spi::as_owner(|spi| spi.execute(FOLD, &[]).map(|_| ()))
}
