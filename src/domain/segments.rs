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

/// Whether memory thinks that nothing in the segment is left to do: all its jobs are disposed
/// and counted.
pub fn looks_finished(segment: &Segment) -> bool {
    segment.state == SegmentState::Sealed
        && segment.disposed
        && segment.live == 0
        && segment.in_flight == 0
}

/// Completed jobs of a segment that are kept equally long.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    pub jobs: i64,
    /// MAX: for ever.
    pub until: i64,
}

/// What is to be done about a segment all of whose jobs have ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposal {
    /// Look again then.
    Wait(i64),
    /// Those that are still to be kept move out, so that the others can go.
    MoveOut,
    Truncate,
}

/// So few jobs move out as soon as the time of any other is over.
const FEW: i64 = 10_000;

/// Jobs are cheapest kept where they are. They move out where they are few, or less than a
/// quarter, so that a queue which keeps its jobs for long holds up none that does not; and all
/// that are kept for longer than segments may stay, so that they do not hold up the ring.
///
/// * `stays_until` - see `stay`
pub fn disposal(shares: &[Share], stays_until: i64, now: i64) -> Disposal {
    let (mut over, mut left, mut next) = (0, 0, stays_until);
    for share in shares {
        if share.until <= now {
            over += share.jobs;
        } else {
            left += share.jobs;
            next = next.min(share.until);
        }
    }
    if left == 0 {
        Disposal::Truncate
    } else if now >= stays_until || over > 0 && (left <= FEW || left <= (over + left) / 4) {
        Disposal::MoveOut
    } else {
        Disposal::Wait(next)
    }
}

/// No segment stays for longer than this for the sake of completed jobs.
const LONGEST_STAY: i64 = 3_600_000_000;

/// How long a segment may stay after the end of its last job: what its queue keeps for longer
/// than the server keeps the others moves out then.
///
/// * `retention` - of the server, microseconds; None: for ever
pub fn stay(retention: Option<i64>) -> i64 {
    retention.unwrap_or(i64::MAX).min(LONGEST_STAY)
}

/// No dump is waited for longer than this.
const LONGEST_DUMP_PATIENCE: i64 = 60_000_000;

/// How long a finished segment waits for snapshots that are older than its end. A dump needs
/// that long at most to get from its snapshot to its locks, unless it waits for somebody's
/// exclusive lock; a snapshot that is held for hours is not to keep the ring from turning.
pub fn dump_patience(rotate_interval: i64) -> i64 {
    rotate_interval.saturating_mul(10).min(LONGEST_DUMP_PATIENCE)
}

/// How long after it was sealed a segment ought to be gone: some turns, and the retention of
/// completed jobs.
pub fn patience(rotate_interval: i64, retention: Option<i64>) -> i64 {
    stay(retention).saturating_add(rotate_interval.saturating_mul(2))
}

/// Whether a segment is past that.
pub fn stays(segment: &Segment, now: i64, patience: i64) -> bool {
    segment.state == SegmentState::Sealed
        && segment.listed
        && segment.in_flight == 0
        && now.saturating_sub(segment.since) >= patience
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: i64 = 60_000_000;
    const HOUR: i64 = 60 * MINUTE;

    fn share(jobs: i64, until: i64) -> Share {
        Share { jobs, until }
    }

    #[test]
    fn what_is_over_goes() {
        assert_eq!(disposal(&[], HOUR, 0), Disposal::Truncate);
        assert_eq!(disposal(&[share(5, MINUTE)], HOUR, MINUTE), Disposal::Truncate);
        assert_eq!(disposal(&[share(5, MINUTE)], HOUR, MINUTE - 1), Disposal::Wait(MINUTE));
    }

    #[test]
    fn few_hold_up_nobody() {
        let shares = [share(1, 0), share(5, MINUTE)];
        assert_eq!(disposal(&shares, HOUR, 0), Disposal::MoveOut);
        let many = [share(1, 0), share(FEW + 1, MINUTE)];
        assert_eq!(disposal(&many, HOUR, 0), Disposal::Wait(MINUTE));
        let quarter = [share(3 * FEW, 0), share(FEW, MINUTE)];
        assert_eq!(disposal(&quarter, HOUR, 0), Disposal::MoveOut);
    }

    #[test]
    fn nothing_holds_up_the_ring_for_ever() {
        let forever = [share(1_000_000, i64::MAX)];
        assert_eq!(stay(None), HOUR);
        assert_eq!(stay(Some(7 * 24 * HOUR)), HOUR);
        assert_eq!(stay(Some(0)), 0);
        assert_eq!(disposal(&forever, HOUR, MINUTE), Disposal::Wait(HOUR));
        assert_eq!(disposal(&forever, HOUR, HOUR), Disposal::MoveOut);
    }
}
