//! The errors of attempts that a segment tells and no body yet.

use std::collections::{HashMap, HashSet};

use super::{claims, closures};
use crate::error::{Error, Result};
use crate::pg::catalog::{self, Leaf};
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;

/// How one attempt failed.
#[derive(Clone, Debug)]
pub struct AttemptError {
    pub attempt: i16,
    pub closed_at: i64,
    pub error: String,
}

/// What one closure says of a claim.
struct Failure {
    /// None: all items of the claim.
    items: Option<Vec<u8>>,
    closed_at: i64,
    error: String,
}

impl Failure {
    fn covers(&self, item: usize) -> bool {
        let byte = |items: &Vec<u8>| items.get(item / 8).copied().unwrap_or(0);
        self.items.as_ref().is_none_or(|items| byte(items) & (1 << (item % 8)) != 0)
    }
}

/// The errors of earlier attempts of the jobs at these positions, in the order of the attempts.
/// Only claims that failed somehow are looked at closely.
pub fn read(
    segment: u8,
    positions: &HashSet<i64>,
    snapshot: Snapshot,
) -> Result<HashMap<i64, Vec<AttemptError>>> {
    let mut found: HashMap<i64, Vec<AttemptError>> = HashMap::new();
    let failures = read_failures(segment, snapshot)?;
    if failures.is_empty() {
        return Ok(found);
    }
    let missing = || Error::internal("a claim lacks a column");
    let table = Table::open(catalog::leaf(Leaf::Claims, segment)?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        use claims::column as c;
        let Some(failures) = row.i64(c::CLAIM_ID).and_then(|claim| failures.get(&claim)) else {
            return Ok(true);
        };
        let at = match row.i64_array(c::POSITIONS)? {
            Some(positions) => positions,
            None => row.i64_array(c::JOB_IDS)?.ok_or_else(missing)?,
        };
        let attempt = row.i16(c::ATTEMPT).ok_or_else(missing)?;
        let attempts = row.i16_array(c::ATTEMPTS)?.unwrap_or_default();
        for (item, position) in at.iter().enumerate().filter(|(_, at)| positions.contains(at)) {
            for failure in failures.iter().filter(|failure| failure.covers(item)) {
                found.entry(*position).or_default().push(AttemptError {
                    attempt: attempts.get(item).copied().unwrap_or(attempt),
                    closed_at: failure.closed_at,
                    error: failure.error.clone(),
                });
            }
        }
        Ok(true)
    })?;
    table.close_release_lock();
    found.values_mut().for_each(|errors| errors.sort_by_key(|error| error.closed_at));
    Ok(found)
}

/// Closures with an error, by claim.
fn read_failures(segment: u8, snapshot: Snapshot) -> Result<HashMap<i64, Vec<Failure>>> {
    let mut failures: HashMap<i64, Vec<Failure>> = HashMap::new();
    let table = Table::open(catalog::leaf(Leaf::Closures, segment)?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        use closures::column as c;
        if let (Some(claim), Some(error)) = (row.i64(c::CLAIM_ID), row.text(c::ERROR)) {
            failures.entry(claim).or_default().push(Failure {
                items: row.bytea(c::ITEMS),
                closed_at: row.micros(c::CLOSED_AT).unwrap_or_default(),
                error,
            });
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(failures)
}
