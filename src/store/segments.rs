//! The states of the segments.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::domain::directory::{self, Listed};
use crate::domain::entities::{SEGMENTS, Segment, SegmentState};
use crate::error::{Error, Result};
use crate::pg::catalog::{self, Leaf};
use crate::pg::datum::ToDatum;
use crate::pg::debug_point::debug_point;
use crate::pg::heap::{self, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::spi::Arg;
use crate::pg::{lock, spi, xact};
use crate::store::evidence::{self, Ends};

pub const BLOCK_SIZE: u64 = 8192;

fn parse(state: &str) -> Result<SegmentState> {
    match state {
        "free" => Ok(SegmentState::Free),
        "current" => Ok(SegmentState::Current),
        "sealed" => Ok(SegmentState::Sealed),
        other => Err(Error::internal(format!("segment has an unknown state \"{other}\""))),
    }
}

/// The segments as last committed, and which of them is current. A database that was never
/// served has no rows yet: segment 0 is current from now on, the others are free.
pub fn read_states() -> Result<([Segment; SEGMENTS], u8)> {
    let mut segments = [Segment::default(); SEGMENTS];
    let (mut current, mut any) = (0, false);
    let table = Table::open(catalog::relation("segments")?, LockMode::AccessShare);
    // Not SelfNow: a row that moves while we look could be passed by.
    table.scan(Snapshot::Latest, |row| {
        let number = row.i16(1).unwrap_or(-1);
        let Some(segment) = usize::try_from(number).ok().and_then(|n| segments.get_mut(n)) else {
            return Err(Error::internal(format!("segment number {number} is out of range")));
        };
        any = true;
        segment.generation = row.i64(2).unwrap_or(0);
        segment.state = parse(row.text(3).as_deref().unwrap_or(""))?;
        segment.since = row.micros(4).unwrap_or(0);
        segment.disposed = row.bool(5).unwrap_or(false);
        segment.listed = !row.is_null(6);
        let counted = row.json(8).and_then(|value| Counted::from_json(&value));
        segment.counted = counted.map_or(0, |counted| counted.times);
        if segment.state == SegmentState::Current {
            current = number as u8;
        }
        Ok(true)
    })?;
    table.close_release_lock();
    if !any {
        segments[0].state = SegmentState::Current;
        segments[0].since = xact::micros();
    }
    Ok((segments, current))
}

/// The relations of a segment: its leaves, and their TOAST tables.
pub fn relations(segment: u8) -> Result<(Vec<u32>, Vec<u32>)> {
    let leaves = [Leaf::Ready, Leaf::Claims, Leaf::Closures]
        .into_iter()
        .map(|leaf| catalog::leaf(leaf, segment))
        .collect::<Result<Vec<_>>>()?;
    let toasts = leaves.iter().filter_map(|leaf| heap::toast_oid(*leaf)).collect();
    Ok((leaves, toasts))
}

/// What the segments take on disk, without indexes and maps.
pub fn disk_bytes() -> Result<u64> {
    let mut blocks = 0;
    for segment in 0..SEGMENTS as u8 {
        let (leaves, toasts) = relations(segment)?;
        let sizes = leaves.iter().chain(&toasts).map(|oid| heap::relation_size_blocks(*oid));
        blocks += sizes.map(u64::from).sum::<u64>();
    }
    Ok(blocks * BLOCK_SIZE)
}

/// What is left to know of a disposed segment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    pub bodies: u64,
    pub last_end: i64,
}

impl Summary {
    fn to_json(self) -> Value {
        json!({ "bodies": self.bodies, "last_end": self.last_end })
    }

    fn from_json(value: &Value) -> Option<Self> {
        Some(Self {
            bodies: value.get("bodies")?.as_u64()?,
            last_end: value.get("last_end")?.as_i64()?,
        })
    }
}

/// Ends by lane.
pub type EndsOfLanes = HashMap<i64, Ends>;

fn ends_to_json(ends: &EndsOfLanes) -> Value {
    ends.iter().map(|(lane, e)| json!([lane, e.completed, e.failed, e.cancelled])).collect()
}

fn ends_from_json(value: &Value) -> Option<EndsOfLanes> {
    let mut ends = HashMap::new();
    for row in value.as_array()? {
        let [lane, completed, failed, cancelled] = row.as_array()?.as_slice() else {
            return None;
        };
        let ends_of_lane = Ends {
            completed: completed.as_i64()?,
            failed: failed.as_i64()?,
            cancelled: cancelled.as_i64()?,
        };
        ends.insert(lane.as_i64()?, ends_of_lane);
    }
    Some(ends)
}

/// The ends of a segment that the totals of queues count.
#[derive(Clone, Debug, Default)]
pub struct Counted {
    /// How often some were added.
    pub times: u32,
    pub ends: EndsOfLanes,
    /// Those of them that were added last.
    pub last: EndsOfLanes,
}

impl Counted {
    /// After some more were counted, so that `ends` are.
    pub fn next(&self, ends: &EndsOfLanes) -> Self {
        Self {
            times: self.times + 1,
            last: evidence::uncounted(ends, &self.ends).into_iter().collect(),
            ends: ends.clone(),
        }
    }

    fn to_json(&self) -> Value {
        let (ends, last) = (ends_to_json(&self.ends), ends_to_json(&self.last));
        json!({ "times": self.times, "ends": ends, "last": last })
    }

    fn from_json(value: &Value) -> Option<Self> {
        Some(Self {
            times: u32::try_from(value.get("times")?.as_u64()?).ok()?,
            ends: ends_from_json(value.get("ends")?)?,
            last: ends_from_json(value.get("last")?)?,
        })
    }
}

/// What the row of a segment saves a start from reading.
#[derive(Default)]
pub struct Known {
    pub generation: i64,
    /// Of a sealed one: its chunks and their bodies.
    pub directory: Option<Vec<Listed>>,
    /// Of a disposed one: nothing in it is left to restore but this.
    pub summary: Option<Summary>,
    pub counted: Counted,
    /// Who wrote the row.
    pub writer: u32,
}

/// Reads it, for each segment. What cannot be read is not known: the leaves tell all but
/// what was counted.
pub fn read_known() -> Result<[Known; SEGMENTS]> {
    let mut known: [Known; SEGMENTS] = Default::default();
    let table = Table::open(catalog::relation("segments")?, LockMode::AccessShare);
    table.scan(Snapshot::Latest, |row| {
        let number = usize::try_from(row.i16(1).unwrap_or(-1)).ok();
        let Some(entry) = number.and_then(|n| known.get_mut(n)) else { return Ok(true) };
        entry.generation = row.i64(2).unwrap_or(0);
        entry.writer = row.xmin();
        if row.text(3).as_deref() == Some("sealed") {
            entry.directory = row.bytea(6).and_then(|bytes| directory::decode(&bytes));
            if row.bool(5) == Some(true) {
                entry.summary = row.json(7).and_then(|value| Summary::from_json(&value));
            }
        }
        if let Some(counted) = row.json(8) {
            entry.counted = Counted::from_json(&counted).ok_or_else(|| {
                Error::internal("the counted ends of a segment are not what was written")
            })?;
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(known)
}

const SEED: &str = "
INSERT INTO awa.segments (segment, generation, state, since, disposed)
SELECT n::pg_catalog.int2, 0, CASE n WHEN 0 THEN 'current' ELSE 'free' END,
       pg_catalog.clock_timestamp(), false
FROM pg_catalog.generate_series(0, 15) AS n
ON CONFLICT (segment) DO NOTHING";

/// Writes the rows of a database that was never served. False when somebody is writing them:
/// a restore, in a transaction that is still open.
pub fn seed() -> Result<bool> {
    if !lock::try_hold_key(catalog::relation("segments")?, 0) {
        return Ok(false);
    }
    spi::as_owner(|spi| spi.execute(SEED, &[]))?;
    debug_point!("segments_seeded");
    Ok(true)
}

const REMOVE: &str = "DELETE FROM awa.segments WHERE segment OPERATOR(pg_catalog.=) $1";

/// Makes way for another row of the segment. Nobody seeds between this and that row.
pub fn remove(segment: i16) -> Result<()> {
    lock::hold_key(catalog::relation("segments")?, 0);
    spi::as_owner(|spi| spi.execute(REMOVE, &[spi::Arg::of(segment)]).map(|_| ()))
}

const SEAL: &str = "
UPDATE awa.segments SET state = 'sealed', since = pg_catalog.clock_timestamp()
WHERE state OPERATOR(pg_catalog.=) 'current'";
const OPEN: &str = "
UPDATE awa.segments SET state = 'current', since = pg_catalog.clock_timestamp(),
    disposed = false, directory = NULL, summary = NULL, counted = NULL
WHERE segment OPERATOR(pg_catalog.=) $1";

/// Whether the segment is the current one, as last committed.
pub fn is_current(segment: u8) -> Result<bool> {
    let (_, current) = read_states()?;
    Ok(current == segment)
}

/// Seals the current segment and makes another one current.
pub fn rotate(next: u8) -> Result<()> {
    spi::as_owner(|spi| {
        spi.execute(SEAL, &[])?;
        spi.execute(OPEN, &[spi::Arg::of(i16::from(next))]).map(|_| ())
    })
}

const FREE: &str = "
UPDATE awa.segments
SET state = 'free', generation = generation OPERATOR(pg_catalog.+) 1,
    since = pg_catalog.clock_timestamp(), disposed = false, directory = NULL, summary = NULL,
    counted = NULL
WHERE segment OPERATOR(pg_catalog.=) $1";

/// Notes that a segment was truncated.
pub fn mark_free(segment: u8) -> Result<()> {
    spi::as_owner(|spi| spi.execute(FREE, &[spi::Arg::of(i16::from(segment))]).map(|_| ()))
}

const DISPOSED: &str = "
UPDATE awa.segments SET disposed = true, summary = $2
WHERE segment OPERATOR(pg_catalog.=) $1 AND state OPERATOR(pg_catalog.=) 'sealed'";

/// Notes that a sealed segment has no undisposed job, so that a start need not read it.
/// All its ends were counted before.
pub fn mark_disposed(segment: u8, summary: Summary) -> Result<()> {
    let args = [Arg::of(i16::from(segment)), Arg::jsonb(Some(summary.to_json().to_datum()))];
    spi::as_owner(|spi| spi.execute(DISPOSED, &args).map(|_| ()))
}

const COUNTED: &str = "
UPDATE awa.segments SET counted = $2 WHERE segment OPERATOR(pg_catalog.=) $1";

/// Notes which ends the totals of queues count.
pub fn write_counted(segment: u8, counted: &Counted) -> Result<()> {
    let args = [Arg::of(i16::from(segment)), Arg::jsonb(Some(counted.to_json().to_datum()))];
    spi::as_owner(|spi| spi.execute(COUNTED, &args).map(|_| ()))
}

const LIST: &str = "
UPDATE awa.segments SET directory = $2
WHERE segment OPERATOR(pg_catalog.=) $1 AND state OPERATOR(pg_catalog.=) 'sealed'";

/// Writes the directory of a sealed segment to which nobody writes bodies any more.
pub fn write_directory(segment: u8, chunks: impl IntoIterator<Item = Listed>) -> Result<()> {
    let bytes = directory::encode(chunks);
    let args = [Arg::of(i16::from(segment)), Arg::bytea(&bytes)];
    spi::as_owner(|spi| spi.execute(LIST, &args).map(|_| ()))
}

const DISTRUST: &str = "
UPDATE awa.segments SET directory = NULL, disposed = false, summary = NULL
WHERE directory IS NOT NULL OR disposed";

/// Somebody writes to a leaf by hand: the leaves alone tell the truth now.
pub fn distrust() -> Result<()> {
    spi::as_owner(|spi| spi.execute(DISTRUST, &[]).map(|_| ()))
}
