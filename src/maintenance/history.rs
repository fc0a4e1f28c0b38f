//! Completed jobs that are still to be kept when their segment goes.

use std::collections::HashMap;

use crate::dispatch::revive;
use crate::domain::bits::CHUNK_SIZE;
use crate::domain::entities::{position, split};
use crate::domain::segments::{self as policy, Disposal, Share};
use crate::error::{Error, Result};
use crate::pg::snapshot::Snapshot;
use crate::pg::{guc, xact};
use crate::store::evidence::{self, Detail, Evidence, Sight};
use crate::store::kept;
use crate::store::lanes::{self, LaneRow};
use crate::store::outcome::Outcome;
use crate::store::segments::EndsOfLanes;
use crate::store::{closures, jobs, queues};

/// Chunks of jobs a transaction.
const CHUNKS: usize = 16;

/// How long the completed jobs of each lane are kept.
pub struct Retentions {
    lanes: HashMap<i64, LaneRow>,
    /// Microseconds; negative: for ever.
    own: HashMap<String, Option<i64>>,
    common: i64,
}

impl Retentions {
    pub fn read() -> Result<Self> {
        Ok(Self {
            lanes: lanes::read_all(Snapshot::SelfNow)?,
            own: queues::completed_retentions()?,
            common: guc::completed_retention().map_or(-1, |kept| kept.as_micros() as i64),
        })
    }

    fn of_lane(&self, lane: i64) -> i64 {
        let queue = self.lanes.get(&lane).map(|lane| lane.queue.as_str());
        queue.and_then(|queue| *self.own.get(queue)?).unwrap_or(self.common)
    }

    /// Until when what ended then is kept.
    fn until(&self, lane: i64, ended: i64) -> i64 {
        match self.of_lane(lane) {
            kept if kept < 0 => i64::MAX,
            kept => ended.saturating_add(kept),
        }
    }

    /// What is to be done about a segment whose jobs have all ended.
    ///
    /// * `ended` - the last of them
    pub fn weigh(&self, ends: &EndsOfLanes, ended: i64, now: i64) -> Disposal {
        let shares: Vec<Share> = ends
            .iter()
            .filter(|(_, ends)| ends.completed > 0)
            .map(|(lane, ends)| Share { jobs: ends.completed, until: self.until(*lane, ended) })
            .collect();
        let common = (self.common >= 0).then_some(self.common);
        policy::disposal(&shares, ended.saturating_add(policy::stay(common)), now)
    }

    /// The chunks with completed jobs that may have to be kept, some of them.
    pub fn chunks_to_keep(&self, evidence: &Evidence, ended: i64, now: i64) -> Vec<i64> {
        let is_left = |lane: i64| self.until(lane, ended) > now;
        let chunks = evidence.chunks.iter().filter(|(_, chunk)| {
            is_left(chunk.lane_id) && chunk.completed.iter().any(|at| !chunk.kept.contains(at))
        });
        chunks.map(|(number, _)| *number).take(CHUNKS).collect()
    }
}

/// Moves the completed jobs of some chunks out of a segment, without those whose time is over,
/// and says so in the segment. Returns how many; None: somebody else is at it.
///
/// All of a chunk that were looked at count as moved, so that none is looked at twice.
pub fn keep(segment: u8, chunks: &[i64], retentions: &Retentions) -> Result<Option<u64>> {
    let (Some(first), Some(last)) = (chunks.first(), chunks.last()) else { return Ok(Some(0)) };
    if !kept::try_hold(segment)? {
        return Ok(None);
    }
    let now = xact::micros();
    let range = (position(*first, 0), position(*last, CHUNK_SIZE as u16 - 1));
    let detail = Detail::Within(range.0, range.1);
    let evidence = evidence::read(segment, Sight::Seen(Snapshot::SelfNow), detail, i64::MAX)?;
    let (mut seen, mut moved, mut over) = (Vec::new(), Vec::new(), Vec::new());
    jobs::completed_within(segment, range, &evidence, &retentions.lanes, |placed, kept| {
        if !chunks.contains(&split(placed.position).0) {
            return;
        }
        seen.push(placed.position);
        if retentions.until(placed.lane_id, kept.done.finalized_at) > now {
            moved.push(kept);
        } else {
            over.push(kept.done);
        }
    })?;
    if seen.is_empty() {
        return Err(Error::internal(format!("segment {segment} lost completed jobs")));
    }
    kept::write(&moved)?;
    revive::forget_completed(&over)?;
    closures::write_unclaimed(segment, &seen, now, Outcome::Kept, None)?;
    Ok(Some(moved.len() as u64))
}
