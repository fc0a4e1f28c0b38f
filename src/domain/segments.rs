//! When segments turn over.
//!
//! ```text
//!             rotate                 truncate
//! free ────────────────> current        │
//!  ^                        │ rotate    │
//!  │                        v           │
//!  └───────────────────── sealed ───────┘
//! ```

use super::entities::{Segment, SegmentState};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Microseconds.
    pub age: i64,
    /// Bytes.
    pub size: u64,
}

/// The segment that becomes current next: None while the current one is empty, young and
/// small, or when no other is free (it then grows).
///
/// * `young` - the segments that may become current
/// * `bytes` - the size of the current one
pub fn next_current(
    young: &[Segment],
    current: u8,
    bytes: u64,
    now: i64,
    limits: &Limits,
) -> Option<u8> {
    let segment = young.get(usize::from(current))?;
    if segment.bodies == 0 {
        return None;
    }
    let old = now.saturating_sub(segment.since) >= limits.age;
    if !old && bytes < limits.size {
        return None;
    }
    let count = young.len() as u8;
    // The next one round the ring, so that each rests as long as it can.
    (1..count)
        .map(|step| (current + step) % count)
        .find(|at| young[usize::from(*at)].state == SegmentState::Free)
}

/// Whether memory thinks that nothing in the segment has to be kept: all its jobs are
/// disposed and counted, and completed ones for longer than their retention.
///
/// * `retention` - microseconds; None: for ever
pub fn looks_finished(segment: &Segment, now: i64, retention: Option<i64>) -> bool {
    let Some(retention) = retention else { return false };
    segment.state == SegmentState::Sealed
        && segment.disposed
        && segment.live == 0
        && segment.in_flight == 0
        && now.saturating_sub(segment.last_end.max(segment.since)) >= retention
}

/// What is finished is given back within this time; what is kept longer moves elsewhere.
pub const LONGEST_STAY: i64 = 3_600_000_000;

/// How long after it was sealed a segment ought to be gone: some turns, and the retention of
/// completed jobs.
pub fn patience(rotate_interval: i64, retention: Option<i64>) -> i64 {
    let kept = retention.unwrap_or(i64::MAX).min(LONGEST_STAY);
    kept.saturating_add(rotate_interval.saturating_mul(2))
}

/// Whether a segment is past that.
pub fn stays(segment: &Segment, now: i64, patience: i64) -> bool {
    segment.state == SegmentState::Sealed
        && segment.listed
        && segment.in_flight == 0
        && now.saturating_sub(segment.since) >= patience
}
