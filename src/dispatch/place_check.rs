//! Where jobs are by their ids, and which receipts were issued.

use std::collections::{HashMap, HashSet};

use crate::domain::entities::{SEGMENTS, split};
use crate::domain::receipt;
use crate::error::Result;
use crate::pg::snapshot::Snapshot;
use crate::store::evidence::Evidence;
use crate::store::{body, deferred, dlq, done, epochs, kept};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Place {
    Segment(u8),
    Deferred,
    Done,
    Dead,
    Kept,
}

/// Jobs outside the segments, and those in them whose ids are not their positions: all others
/// are in one place because a position is.
#[derive(Default)]
pub struct Places {
    jobs: Vec<(i64, Place)>,
    /// Positions of which another id is known.
    named: HashSet<i64>,
}

impl Places {
    /// * `segments` - what their rows say, one each
    pub fn read(segments: &[Evidence]) -> Result<Self> {
        let mut places = Self::default();
        for (segment, evidence) in (0..SEGMENTS as u8).zip(segments) {
            body::read_named(segment, |position, job_id| {
                places.named.insert(position);
                if is_live(evidence, position) {
                    places.jobs.push((job_id, Place::Segment(segment)));
                }
            })?;
        }
        deferred::read_all(Snapshot::SelfNow, |row| {
            places.jobs.push((row.job_id, Place::Deferred));
            Ok(true)
        })?;
        done::read_all(Snapshot::SelfNow, |row| {
            places.jobs.push((row.job_id, Place::Done));
            Ok(true)
        })?;
        dlq::read_all(Snapshot::SelfNow, |row| {
            places.jobs.push((row.done.job_id, Place::Dead));
            Ok(true)
        })?;
        kept::read_all(Snapshot::SelfNow, |row| {
            places.jobs.push((row.done.job_id, Place::Kept));
            Ok(true)
        })?;
        Ok(places)
    }

    /// At most `limit` faults, in words.
    pub fn compare(&self, segments: &[Evidence], limit: usize) -> Vec<String> {
        let mut faults = Vec::new();
        let mut seen: HashMap<i64, Place> = HashMap::new();
        for (job_id, place) in &self.jobs {
            if let Some(other) = seen.insert(*job_id, *place) {
                faults.push(format!("job {job_id} is in two places: {other:?} and {place:?}"));
            }
            // Its id was its position once, and that may still be its place.
            let first = segments.iter().any(|evidence| is_live(evidence, *job_id));
            if first && !self.named.contains(job_id) {
                faults.push(format!("job {job_id} is at its first position and in {place:?}"));
            }
        }
        faults.truncate(limit);
        faults
    }
}

fn is_live(evidence: &Evidence, position: i64) -> bool {
    let (number, offset) = split(position);
    let chunk = evidence.chunks.get(&number);
    chunk.is_some_and(|chunk| chunk.bodies.contains(offset) && !chunk.disposed.contains(offset))
}

/// Every receipt belongs to one claim, of an epoch that was committed before it was issued,
/// and memory will issue others.
///
/// * `next` - the first receipt that memory may issue
pub fn compare_receipts(segments: &[Evidence], next: i64, limit: usize) -> Result<Vec<String>> {
    let mut faults = Vec::new();
    let mut ranges: Vec<(i64, i64)> = segments
        .iter()
        .flat_map(|s| &s.claims)
        .map(|claim| (claim.id, claim.id + i64::from(claim.count)))
        .collect();
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        if let [(first, end), (later, _)] = pair
            && later < end
        {
            faults.push(format!("receipts from {later} on are of claim {first} too"));
        }
    }
    if let Some((first, end)) = ranges.last()
        && *end > next
    {
        faults.push(format!("claim {first} has receipts that are still to be issued, from {next}"));
    }
    let last_epoch = epochs::last()?.map_or(0, |epoch| receipt::first_of(epoch + 1));
    for (first, end) in ranges.iter().filter(|(_, end)| *end > last_epoch) {
        faults.push(format!("claim {first} ends at {end}, beyond the last epoch"));
    }
    faults.truncate(limit);
    Ok(faults)
}
