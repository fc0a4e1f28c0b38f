//! The states of the segments.

use crate::domain::entities::{SEGMENTS, Segment, SegmentState};
use crate::error::{Error, Result};
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::{catalog, spi};

fn parse(state: &str) -> Result<SegmentState> {
    match state {
        "free" => Ok(SegmentState::Free),
        "current" => Ok(SegmentState::Current),
        "sealed" => Ok(SegmentState::Sealed),
        other => Err(Error::internal(format!("segment has an unknown state \"{other}\""))),
    }
}

/// The segments as last committed, and which of them is current. A database that was never
/// served has no rows yet: segment 0 is current, the others are free.
pub fn read_states() -> Result<([Segment; SEGMENTS], u8)> {
    let mut segments = [Segment::default(); SEGMENTS];
    let (mut current, mut any) = (0, false);
    let table = Table::open(catalog::relation("segments")?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        let number = row.i16(1).unwrap_or(-1);
        let Some(segment) = usize::try_from(number).ok().and_then(|n| segments.get_mut(n)) else {
            return Err(Error::internal(format!("segment number {number} is out of range")));
        };
        any = true;
        segment.generation = row.i64(2).unwrap_or(0);
        segment.state = parse(row.text(3).as_deref().unwrap_or(""))?;
        segment.since = row.micros(4).unwrap_or(0);
        if segment.state == SegmentState::Current {
            current = number as u8;
        }
        Ok(true)
    })?;
    table.close_release_lock();
    if !any {
        segments[0].state = SegmentState::Current;
    }
    Ok((segments, current))
}

/// Segments of which the table says that no undisposed job is left in them.
pub fn read_disposed() -> Result<[bool; SEGMENTS]> {
    let mut disposed = [false; SEGMENTS];
    let table = Table::open(catalog::relation("segments")?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        let number = usize::try_from(row.i16(1).unwrap_or(-1)).ok();
        if let Some(flag) = number.and_then(|n| disposed.get_mut(n)) {
            *flag = row.bool(5).unwrap_or(false);
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(disposed)
}

const SEED: &str = "
INSERT INTO awa.segments (segment, generation, state, since, disposed)
SELECT n::pg_catalog.int2, 0, CASE n WHEN 0 THEN 'current' ELSE 'free' END,
       pg_catalog.clock_timestamp(), false
FROM pg_catalog.generate_series(0, 15) AS n
ON CONFLICT (segment) DO NOTHING";

/// Writes the rows of a database that was never served.
pub fn seed() -> Result<()> {
    spi::as_owner(|spi| spi.execute(SEED, &[]).map(|_| ()))
}

const REMOVE: &str = "DELETE FROM awa.segments WHERE segment OPERATOR(pg_catalog.=) $1";

/// Makes way for another row of the segment.
pub fn remove(segment: i16) -> Result<()> {
    spi::as_owner(|spi| spi.execute(REMOVE, &[spi::Arg::of(segment)]).map(|_| ()))
}

const SEAL: &str = "
UPDATE awa.segments SET state = 'sealed', since = pg_catalog.clock_timestamp()
WHERE state OPERATOR(pg_catalog.=) 'current'";
const OPEN: &str = "
UPDATE awa.segments SET state = 'current', since = pg_catalog.clock_timestamp(), disposed = false
WHERE segment OPERATOR(pg_catalog.=) $1";

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
    since = pg_catalog.clock_timestamp(), disposed = false
WHERE segment OPERATOR(pg_catalog.=) $1";

/// Notes that a segment was truncated.
pub fn mark_free(segment: u8) -> Result<()> {
    spi::as_owner(|spi| spi.execute(FREE, &[spi::Arg::of(i16::from(segment))]).map(|_| ()))
}

const DISPOSED: &str = "
UPDATE awa.segments SET disposed = true
WHERE segment OPERATOR(pg_catalog.=) $1 AND NOT disposed";

/// Notes that a sealed segment has no undisposed job, so that a start need not read it.
pub fn mark_disposed(segment: u8) -> Result<()> {
    spi::as_owner(|spi| spi.execute(DISPOSED, &[spi::Arg::of(i16::from(segment))]).map(|_| ()))
}
