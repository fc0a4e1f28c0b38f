//! Claim rows: one a call, lane and segment.

use std::cell::Cell;

use crate::error::Result;
use crate::pg::catalog::{self, Leaf};
use crate::pg::datum::{self, Datum, Element, Timestamp, ToDatum};
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::xact;

pub mod column {
    pub const CLAIM_ID: i16 = 1;
    pub const LANE_ID: i16 = 2;
    pub const CLAIMED_AT: i16 = 3;
    pub const DEADLINE_AT: i16 = 4;
    pub const RUNTIME: i16 = 5;
    pub const ATTEMPT: i16 = 6;
    pub const PRIORITY: i16 = 7;
    pub const ATTEMPTS: i16 = 8;
    pub const JOB_IDS: i16 = 9;
    pub const POSITIONS: i16 = 10;
    pub const DEADLINES: i16 = 11;
}

/// One claimed attempt, as its row will say it.
#[derive(Clone, Copy, Debug)]
pub struct ClaimedItem {
    pub job_id: i64,
    pub position: i64,
    pub attempt: i16,
    /// Microseconds; MAX: none.
    pub deadline: i64,
}

pub struct NewClaim<'a> {
    pub segment: u8,
    pub id: i64,
    pub lane_id: i64,
    /// None: the lane's.
    pub priority: Option<u8>,
    pub claimed_at: i64,
    pub runtime: Option<[u8; 16]>,
    pub items: &'a [ClaimedItem],
}

thread_local! {
    /// Where WAL ended after the last claim of this transaction, as long as it wrote
    /// nothing but claims; 0 otherwise.
    static LAST_RECORD: Cell<u64> = const { Cell::new(0) };
}

/// See `LAST_RECORD`; for the decision whether a commit may be asynchronous.
pub fn last_record() -> u64 {
    LAST_RECORD.get()
}

/// The transaction is over.
pub fn forget_last_record() {
    LAST_RECORD.set(0);
}

/// Appends claim rows.
pub fn write(claims: &[NewClaim<'_>]) -> Result<()> {
    let before = xact::last_rec_end();
    let only_claims = before == 0 || before == LAST_RECORD.get();
    for claim in claims {
        let table =
            Table::open(catalog::leaf(Leaf::Claims, claim.segment)?, LockMode::RowExclusive);
        table.insert(&to_row(claim))?;
        table.close_keep_lock();
    }
    LAST_RECORD.set(if only_claims { xact::last_rec_end() } else { 0 });
    Ok(())
}

fn to_row(claim: &NewClaim<'_>) -> [Option<Datum>; 11] {
    let items = claim.items;
    let first = items.first();
    let attempt = first.map_or(1, |item| item.attempt);
    let deadline = first.map_or(i64::MAX, |item| item.deadline);
    let attempts = items
        .iter()
        .any(|item| item.attempt != attempt)
        .then(|| datum::smallint_array(&items.iter().map(|item| item.attempt).collect::<Vec<_>>()));
    let same_deadline = items.iter().all(|item| item.deadline == deadline);
    let timestamp = |at: i64| (at != i64::MAX).then(|| Timestamp(at).to_datum());
    let deadlines = (!same_deadline).then(|| {
        // Infinity, which is MAX, is none.
        let values: Vec<_> = items.iter().map(|item| Timestamp(item.deadline)).collect();
        datum::array_of(Element::TIMESTAMPTZ, &values)
    });
    let job_ids: Vec<i64> = items.iter().map(|item| item.job_id).collect();
    let positions = items
        .iter()
        .any(|item| item.position != item.job_id)
        .then(|| datum::bigint_array(&items.iter().map(|item| item.position).collect::<Vec<_>>()));
    [
        Some(claim.id.to_datum()),
        Some(claim.lane_id.to_datum()),
        Some(Timestamp(claim.claimed_at).to_datum()),
        if same_deadline { timestamp(deadline) } else { None },
        claim.runtime.map(|id| id.to_datum()),
        Some(attempt.to_datum()),
        claim.priority.map(|priority| i16::from(priority).to_datum()),
        attempts,
        Some(datum::bigint_array(&job_ids)),
        positions,
        deadlines,
    ]
}
