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

/// An attempt of one of the jobs.
struct Tried {
    item: usize,
    position: i64,
    attempt: i16,
}

/// The errors of earlier attempts of the jobs at these positions, in the order of the attempts.
/// Only claims that failed somehow are looked at closely, and no text is read but theirs.
pub fn read(
    segment: u8,
    positions: &HashSet<i64>,
    snapshot: Snapshot,
) -> Result<HashMap<i64, Vec<AttemptError>>> {
    let failed = read_failed(segment, snapshot)?;
    let tried = read_tried(segment, positions, &failed, snapshot)?;
    let mut found: HashMap<i64, Vec<AttemptError>> = HashMap::new();
    if tried.is_empty() {
        return Ok(found);
    }
    let table = Table::open(catalog::leaf(Leaf::Closures, segment)?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        use closures::column as c;
        let Some(tried) = row.i64(c::CLAIM_ID).and_then(|claim| tried.get(&claim)) else {
            return Ok(true);
        };
        // None: all items of the claim.
        let items = row.bytea(c::ITEMS);
        let byte = |items: &Vec<u8>, item: usize| items.get(item / 8).copied().unwrap_or(0);
        let covers =
            |item| items.as_ref().is_none_or(|items| byte(items, item) & (1 << (item % 8)) != 0);
        for Tried { position, attempt, .. } in tried.iter().filter(|tried| covers(tried.item)) {
            let Some(error) = row.text(c::ERROR) else { break };
            let closed_at = row.micros(c::CLOSED_AT).unwrap_or_default();
            let error = AttemptError { attempt: *attempt, closed_at, error };
            found.entry(*position).or_default().push(error);
        }
        Ok(true)
    })?;
    table.close_release_lock();
    found.values_mut().for_each(|errors| errors.sort_by_key(|error| error.closed_at));
    Ok(found)
}

/// Claims of which some attempt left an error.
fn read_failed(segment: u8, snapshot: Snapshot) -> Result<HashSet<i64>> {
    let mut failed = HashSet::new();
    let table = Table::open(catalog::leaf(Leaf::Closures, segment)?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        use closures::column as c;
        if !row.is_null(c::ERROR) {
            failed.extend(row.i64(c::CLAIM_ID));
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(failed)
}

/// The attempts of the jobs at these positions, of those claims.
fn read_tried(
    segment: u8,
    positions: &HashSet<i64>,
    of: &HashSet<i64>,
    snapshot: Snapshot,
) -> Result<HashMap<i64, Vec<Tried>>> {
    let mut found: HashMap<i64, Vec<Tried>> = HashMap::new();
    if of.is_empty() {
        return Ok(found);
    }
    let missing = || Error::internal("a claim lacks a column");
    let table = Table::open(catalog::leaf(Leaf::Claims, segment)?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        use claims::column as c;
        let Some(claim) = row.i64(c::CLAIM_ID).filter(|claim| of.contains(claim)) else {
            return Ok(true);
        };
        let at = match row.i64_array(c::POSITIONS)? {
            Some(positions) => positions,
            None => row.i64_array(c::JOB_IDS)?.ok_or_else(missing)?,
        };
        let attempt = row.i16(c::ATTEMPT).ok_or_else(missing)?;
        let attempts = row.i16_array(c::ATTEMPTS)?.unwrap_or_default();
        for (item, position) in at.into_iter().enumerate().filter(|(_, at)| positions.contains(at))
        {
            let attempt = attempts.get(item).copied().unwrap_or(attempt);
            found.entry(claim).or_default().push(Tried { item, position, attempt });
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(found)
}
