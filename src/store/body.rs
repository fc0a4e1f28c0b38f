//! Bodies: the row that a job is, in `ready_entries`.

use crate::domain::bits::{Bits, CHUNK_SIZE};
use crate::domain::entities::{position, split};
use crate::error::{Error, Result};
use crate::pg::catalog::{self, Leaf, LeafIndex};
use crate::pg::datum::{Datum, Timestamp, ToDatum};
use crate::pg::heap::{Row, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;

/// Numbers of the columns of `ready_entries`.
pub mod column {
    pub const POSITION: i16 = 1;
    pub const LANE_ID: i16 = 2;
    pub const CREATED_AT: i16 = 3;
    pub const JOB_ID: i16 = 4;
    pub const RUN_AT: i16 = 5;
    pub const EXPIRES_AT: i16 = 6;
    pub const ATTEMPTS: i16 = 7;
    pub const MAX_ATTEMPTS: i16 = 8;
    pub const KIND: i16 = 9;
    pub const ARGS: i16 = 10;
    pub const METADATA: i16 = 11;
    pub const TAGS: i16 = 12;
    pub const UNIQUE_KEY: i16 = 13;
    pub const UNIQUE_STATES: i16 = 14;
    pub const ORDERING_KEY: i16 = 15;
    pub const CONCURRENCY_KEY: i16 = 16;
    pub const ATTEMPT_DEADLINE: i16 = 17;
    pub const HISTORY: i16 = 18;
    pub const COUNT: usize = 18;
}

/// What a job is, wherever its row lies. Values that users gave pass through untouched.
#[derive(Clone, Copy, Debug)]
pub struct Body {
    pub created_at: i64,
    /// None: equal to `created_at`.
    pub run_at: Option<i64>,
    pub expires_at: Option<i64>,
    /// Used before this row was written.
    pub attempts: i16,
    pub max_attempts: i16,
    pub kind: Datum,
    pub args: Datum,
    pub metadata: Option<Datum>,
    pub tags: Option<Datum>,
    pub unique_key: Option<Datum>,
    pub unique_states: Option<Datum>,
    pub ordering_key: Option<Datum>,
    pub concurrency_key: Option<Datum>,
    pub attempt_deadline: Option<Datum>,
    pub history: Option<Datum>,
}

impl Body {
    pub fn run_at(&self) -> i64 {
        self.run_at.unwrap_or(self.created_at)
    }

    /// The columns that the tables outside the segments end with.
    pub fn tail(&self) -> [Option<Datum>; 10] {
        [
            Some(self.kind),
            Some(self.args),
            self.metadata,
            self.tags,
            self.unique_key,
            self.unique_states,
            self.ordering_key,
            self.concurrency_key,
            self.attempt_deadline,
            self.history,
        ]
    }
}

/// A body and where it lies.
#[derive(Clone, Copy, Debug)]
pub struct Placed {
    pub position: i64,
    pub lane_id: i64,
    /// None: equal to the position.
    pub job_id: Option<i64>,
    pub body: Body,
}

impl Placed {
    pub fn job_id(&self) -> i64 {
        self.job_id.unwrap_or(self.position)
    }

    fn to_row(self) -> [Option<Datum>; column::COUNT] {
        let body = &self.body;
        let [kind, args, metadata, tags, key, states, ordering, concurrency, deadline, history] =
            body.tail();
        [
            Some(self.position.to_datum()),
            Some(self.lane_id.to_datum()),
            Some(Timestamp(body.created_at).to_datum()),
            self.job_id.map(|id| id.to_datum()),
            body.run_at.map(|at| Timestamp(at).to_datum()),
            body.expires_at.map(|at| Timestamp(at).to_datum()),
            Some(body.attempts.to_datum()),
            Some(body.max_attempts.to_datum()),
            kind,
            args,
            metadata,
            tags,
            key,
            states,
            ordering,
            concurrency,
            deadline,
            history,
        ]
    }

    /// Copies a row out of its page.
    pub fn from_row(row: &Row) -> Result<Self> {
        use column as c;
        let missing = || Error::internal("a row of ready_entries lacks a value");
        Ok(Self {
            position: row.i64(c::POSITION).ok_or_else(missing)?,
            lane_id: row.i64(c::LANE_ID).ok_or_else(missing)?,
            job_id: row.i64(c::JOB_ID),
            body: Body {
                created_at: row.micros(c::CREATED_AT).ok_or_else(missing)?,
                run_at: row.micros(c::RUN_AT),
                expires_at: row.micros(c::EXPIRES_AT),
                attempts: row.i16(c::ATTEMPTS).ok_or_else(missing)?,
                max_attempts: row.i16(c::MAX_ATTEMPTS).ok_or_else(missing)?,
                kind: row.copied_varlena(c::KIND).ok_or_else(missing)?,
                args: row.copied_varlena(c::ARGS).ok_or_else(missing)?,
                metadata: row.copied_varlena(c::METADATA),
                tags: row.copied_varlena(c::TAGS),
                unique_key: row.copied_varlena(c::UNIQUE_KEY),
                unique_states: row.copied_varlena(c::UNIQUE_STATES),
                ordering_key: row.copied_varlena(c::ORDERING_KEY),
                concurrency_key: row.copied_varlena(c::CONCURRENCY_KEY),
                attempt_deadline: row.interval(c::ATTEMPT_DEADLINE).map(|i| i.to_datum()),
                history: row.copied_varlena(c::HISTORY),
            },
        })
    }
}

/// Appends bodies to a segment.
pub fn write(segment: u8, jobs: &[Placed]) -> Result<()> {
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::RowExclusive);
    if let [job] = jobs {
        table.insert(&job.to_row())?;
    } else {
        let rows: Vec<_> = jobs.iter().map(|job| job.to_row()).collect();
        table.insert_many(rows.iter().map(|row| &row[..]))?;
    }
    table.close_keep_lock();
    Ok(())
}

/// The offsets of a chunk that have a committed body.
pub fn read_offsets(segment: u8, chunk: i64) -> Result<Bits> {
    let mut bits = Bits::default();
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    let index = catalog::leaf_index(LeafIndex::Position, segment)?;
    let (first, last) = (position(chunk, 0), position(chunk, CHUNK_SIZE as u16 - 1));
    table.index_range(index, first, last, Snapshot::SelfNow, |row| {
        if let Some(at) = row.i64(column::POSITION) {
            bits.insert(split(at).1);
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(bits)
}

/// Positions and ids of the bodies in a segment whose ids are not their positions.
pub fn read_named(segment: u8, mut take: impl FnMut(i64, i64)) -> Result<()> {
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        if let (Some(position), Some(job_id)) = (row.i64(column::POSITION), row.i64(column::JOB_ID))
        {
            take(position, job_id);
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(())
}

/// Every body of a segment that a snapshot sees, until `take` returns false.
pub fn scan(
    segment: u8,
    snapshot: Snapshot,
    mut take: impl FnMut(Placed) -> Result<bool>,
) -> Result<()> {
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    table.scan(snapshot, |row| take(Placed::from_row(row)?))?;
    table.close_release_lock();
    Ok(())
}

/// The committed bodies between two positions, both included.
pub fn scan_within(
    segment: u8,
    first: i64,
    last: i64,
    mut take: impl FnMut(Placed) -> Result<()>,
) -> Result<()> {
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    let index = catalog::leaf_index(LeafIndex::Position, segment)?;
    table.index_range(index, first, last, Snapshot::SelfNow, |row| {
        take(Placed::from_row(row)?).map(|()| true)
    })?;
    table.close_release_lock();
    Ok(())
}

/// The bodies of a job in a segment: none, or one; more only after it has moved within it.
pub fn find(segment: u8, job_id: i64, snapshot: Snapshot) -> Result<Vec<Placed>> {
    let mut found = Vec::new();
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    let by_position = catalog::leaf_index(LeafIndex::Position, segment)?;
    table.index_range(by_position, job_id, job_id, snapshot, |row| {
        // The position of another job may equal the id of one that moved.
        if row.is_null(column::JOB_ID) {
            found.push(Placed::from_row(row)?);
        }
        Ok(true)
    })?;
    let by_id = catalog::leaf_index(LeafIndex::JobId, segment)?;
    table.index_range(by_id, job_id, job_id, snapshot, |row| {
        found.push(Placed::from_row(row)?);
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(found)
}

/// The id of the job at a position; None: there is none.
pub fn job_id_at(segment: u8, position: i64) -> Result<Option<i64>> {
    let mut job_id = None;
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    let index = catalog::leaf_index(LeafIndex::Position, segment)?;
    table.index_range(index, position, position, Snapshot::SelfNow, |row| {
        job_id = Some(row.i64(column::JOB_ID).unwrap_or(position));
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(job_id)
}

/// The transaction that wrote a body, as far as the row tells.
pub fn writer(segment: u8, job_id: i64, position: i64) -> Result<Option<u32>> {
    let mut writer = None;
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    let index = catalog::leaf_index(LeafIndex::Position, segment)?;
    table.index_range(index, position, position, Snapshot::SelfNow, |row| {
        if row.i64(column::JOB_ID).unwrap_or(position) == job_id {
            writer = Some(row.xmin());
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(writer)
}

/// The bodies at these positions of one segment, in the order asked for.
///
/// The dispatcher has proved that their transactions committed, hence SnapshotSelf: the row
/// is seen in every isolation level, and a serializable transaction takes no lock on it.
pub fn read(segment: u8, positions: &[i64]) -> Result<Vec<Placed>> {
    let missing = || Error::internal("a job that memory knows has no body");
    let found = read_each(segment, positions, Placed::from_row)?;
    found.into_iter().map(|job| job.ok_or_else(missing)).collect()
}

/// The ordering keys of the bodies at these positions of one segment, in the order asked for.
/// None: there is no body any more.
pub fn read_ordering_keys(segment: u8, positions: &[i64]) -> Result<Vec<Option<Option<Datum>>>> {
    read_each(segment, positions, |row| Ok(row.copied_varlena(column::ORDERING_KEY)))
}

fn read_each<T: Clone>(
    segment: u8,
    positions: &[i64],
    take: impl Fn(&Row) -> Result<T>,
) -> Result<Vec<Option<T>>> {
    let mut order: Vec<usize> = (0..positions.len()).collect();
    order.sort_unstable_by_key(|at| positions[*at]);
    let mut found: Vec<Option<T>> = vec![None; positions.len()];
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    let index = catalog::leaf_index(LeafIndex::Position, segment)?;
    let mut rest = order.as_slice();
    while let Some((first, _)) = rest.split_first() {
        // One range scan for positions that are close: neighbours share their pages.
        let run = rest
            .windows(2)
            .position(|pair| positions[pair[1]] - positions[pair[0]] > 32)
            .map_or(rest.len(), |at| at + 1);
        let (run, behind) = rest.split_at(run);
        let last = run[run.len() - 1];
        let mut next = 0;
        table.index_range(index, positions[*first], positions[last], Snapshot::SelfNow, |row| {
            let position = row.i64(column::POSITION).unwrap_or(-1);
            while next < run.len() && positions[run[next]] < position {
                next += 1;
            }
            if next < run.len() && positions[run[next]] == position {
                found[run[next]] = Some(take(row)?);
                next += 1;
            }
            Ok(next < run.len())
        })?;
        rest = behind;
    }
    table.close_release_lock();
    Ok(found)
}
