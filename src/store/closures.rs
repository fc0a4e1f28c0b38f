//! Closure rows: items of one claim that came to the same end together.

use crate::error::Result;
use crate::pg::catalog::{self, Leaf};
use crate::pg::datum::{self, Char, Datum, Timestamp, ToDatum};
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;

use super::outcome::Outcome;

pub mod column {
    pub const CLAIM_ID: i16 = 1;
    pub const CLOSED_AT: i16 = 2;
    pub const DUE_AT: i16 = 3;
    pub const OUTCOME: i16 = 4;
    pub const ITEMS: i16 = 5;
    pub const POSITIONS: i16 = 6;
    pub const ERROR: i16 = 7;
    pub const RESULT: i16 = 8;
}

pub struct NewClosure<'a> {
    pub claim_id: i64,
    /// How many items the claim had.
    pub count: u32,
    /// Their numbers in the claim.
    pub items: &'a [u32],
    pub closed_at: i64,
    pub due_at: Option<i64>,
    pub outcome: Outcome,
    pub error: Option<&'a str>,
    pub result: Option<Datum>,
}

/// Appends a closure of jobs that no attempt had.
pub fn write_unclaimed(
    segment: u8,
    positions: &[i64],
    closed_at: i64,
    outcome: Outcome,
    error: Option<&str>,
) -> Result<()> {
    let table = Table::open(catalog::leaf(Leaf::Closures, segment)?, LockMode::RowExclusive);
    table.insert(&[
        None,
        Some(Timestamp(closed_at).to_datum()),
        None,
        Some(Char(outcome.code()).to_datum()),
        None,
        Some(datum::bigint_array(positions)),
        error.map(ToDatum::to_datum),
        None,
    ])?;
    table.close_keep_lock();
    Ok(())
}

/// Appends closures to the segment that holds the bodies.
pub fn write(segment: u8, closures: &[NewClosure<'_>]) -> Result<()> {
    let table = Table::open(catalog::leaf(Leaf::Closures, segment)?, LockMode::RowExclusive);
    let rows: Vec<_> = closures.iter().map(to_row).collect();
    if let [row] = rows.as_slice() {
        table.insert(row)?;
    } else {
        table.insert_many(rows.iter().map(|row| &row[..]))?;
    }
    table.close_keep_lock();
    Ok(())
}

fn to_row(closure: &NewClosure<'_>) -> [Option<Datum>; 8] {
    let all = closure.items.len() == closure.count as usize;
    [
        Some(closure.claim_id.to_datum()),
        Some(Timestamp(closure.closed_at).to_datum()),
        closure.due_at.map(|at| Timestamp(at).to_datum()),
        Some(Char(closure.outcome.code()).to_datum()),
        (!all).then(|| bitmap(closure.count, closure.items).as_slice().to_datum()),
        None,
        closure.error.map(ToDatum::to_datum),
        closure.result,
    ]
}

/// Bit i, from the low end of byte i/8, is item i. Zero bytes at the end are left out.
fn bitmap(count: u32, items: &[u32]) -> Vec<u8> {
    let mut bytes = vec![0_u8; count.div_ceil(8) as usize];
    for item in items {
        if let Some(byte) = bytes.get_mut(*item as usize / 8) {
            *byte |= 1 << (item % 8);
        }
    }
    while bytes.last() == Some(&0) {
        bytes.pop();
    }
    bytes
}
