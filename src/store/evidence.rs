//! What the rows of one segment say about its jobs.
//!
//! One reading serves all who need the truth from the tables: replay, the proof before a
//! truncation, `awa.check()`, and the readers of jobs. It costs a few bits a job.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::outcome::Outcome;
use super::{body, claims, closures};
use crate::domain::bits::Bits;
use crate::domain::directory::Listed;
use crate::domain::entities::split;
use crate::error::{Error, Result};
use crate::pg::catalog::{self, Leaf};
use crate::pg::datum::Timestamp;
use crate::pg::heap::{self, Fate, Row, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;

/// Which rows count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sight {
    /// Those a snapshot sees.
    Seen(Snapshot),
    /// All that committed, and those of transactions whose end is open, as pending.
    Everything,
    /// As `Everything`; who wrote the rows is kept too.
    Signed,
}

/// For which jobs the ends of their attempts are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    None,
    /// Of the jobs between these positions, both included.
    Within(i64, i64),
    All,
}

impl Detail {
    fn has(self, position: i64) -> bool {
        match self {
            Self::None => false,
            Self::Within(first, last) => (first..=last).contains(&position),
            Self::All => true,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct ChunkEvidence {
    pub lane_id: i64,
    /// Since when its oldest job waits.
    pub born: i64,
    pub bodies: Bits,
    /// The segment is done with them.
    pub disposed: Bits,
    /// Of these, those that completed.
    pub completed: Bits,
    /// Of these, those that moved out afterwards.
    pub kept: Bits,
    pub open: Bits,
    /// Released by their latest attempt.
    pub released: Bits,
    /// Bodies of transactions whose end is open.
    pub pending: u16,
    /// Waiting jobs that transactions whose end is open dispose of.
    pub withdrawn: Bits,
}

impl Evidence {
    /// The chunks and their bodies, as the directory of the segment lists them.
    pub fn directory(&self) -> impl Iterator<Item = Listed> {
        self.chunks.iter().filter(|(_, chunk)| !chunk.bodies.is_empty()).map(|(number, chunk)| {
            let ChunkEvidence { lane_id, born, bodies, .. } = *chunk;
            Listed { number: *number, lane_id, born, bodies }
        })
    }
}

impl ChunkEvidence {
    /// Jobs that were never claimed or whose claims are forgotten.
    pub fn ready(&self) -> Bits {
        let mut ready = Bits::default();
        for bit in self.bodies.iter() {
            let taken = self.disposed.contains(bit)
                || self.open.contains(bit)
                || self.released.contains(bit);
            if !taken {
                ready.insert(bit);
            }
        }
        ready
    }

    /// Whatever claims and closures name has a body.
    fn is_embodied(&self) -> bool {
        [&self.disposed, &self.open, &self.released]
            .into_iter()
            .all(|bits| bits.iter().all(|bit| self.bodies.contains(bit)))
    }

    /// No claim and no closure names one of its jobs.
    pub fn is_untouched(&self) -> bool {
        self.pending == 0
            && self.disposed.is_empty()
            && self.open.is_empty()
            && self.released.is_empty()
            && self.withdrawn.is_empty()
    }

    pub fn live(&self) -> u16 {
        self.bodies.iter().filter(|bit| !self.disposed.contains(*bit)).count() as u16
    }
}

#[derive(Clone, Copy, Debug)]
pub struct ClaimHeader {
    pub id: i64,
    pub lane_id: i64,
    pub claimed_at: i64,
    pub runtime: Option<[u8; 16]>,
    /// With which its jobs were claimed; None: the lane's.
    pub priority: Option<i16>,
    pub count: u32,
    /// Of the claiming transaction, while its end is open.
    pub xid: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
pub struct OpenItem {
    /// Index in `claims`.
    pub claim: usize,
    pub receipt: i64,
    pub position: i64,
    pub job_id: i64,
    pub attempt: i16,
    /// Microseconds; MAX: none.
    pub deadline: i64,
    /// A transaction whose end is open closes it like this.
    pub closing: Option<(u32, Outcome, Option<i64>)>,
}

#[derive(Clone, Copy, Debug)]
pub struct Released {
    pub receipt: i64,
    /// Attempts used.
    pub attempts: i16,
    pub due: i64,
    pub snoozed: bool,
}

/// How an attempt ended.
#[derive(Clone, Debug)]
pub struct AttemptEnd {
    pub receipt: i64,
    pub attempt: i16,
    pub runtime: Option<[u8; 16]>,
    /// With which the job was claimed; None: the lane's.
    pub priority: Option<i16>,
    pub claimed_at: i64,
    pub closed_at: i64,
    pub outcome: Outcome,
    pub error: Option<String>,
    /// Text of the jsonb.
    pub result: Option<String>,
}

/// Jobs that came to an end, by lane.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    pub completed: i64,
    pub failed: i64,
    pub cancelled: i64,
}

impl Ends {
    pub fn add(&mut self, other: Self) {
        self.completed += other.completed;
        self.failed += other.failed;
        self.cancelled += other.cancelled;
    }

    pub fn minus(self, other: Self) -> Self {
        Self {
            completed: self.completed - other.completed,
            failed: self.failed - other.failed,
            cancelled: self.cancelled - other.cancelled,
        }
    }
}

/// Those of `ends` that `counted` does not have, without the lanes that have none.
pub fn uncounted(ends: &HashMap<i64, Ends>, counted: &HashMap<i64, Ends>) -> Vec<(i64, Ends)> {
    ends.iter()
        .map(|(lane, ends)| (*lane, ends.minus(counted.get(lane).copied().unwrap_or_default())))
        .filter(|(_, ends)| *ends != Ends::default())
        .collect()
}

#[derive(Default)]
pub struct Evidence {
    pub chunks: BTreeMap<i64, ChunkEvidence>,
    pub claims: Vec<ClaimHeader>,
    pub open: Vec<OpenItem>,
    /// By position.
    pub released: HashMap<i64, Released>,
    pub ends: HashMap<i64, Ends>,
    /// By position; see `Detail`.
    pub attempts: HashMap<i64, Vec<AttemptEnd>>,
    /// Positions of bodies of transactions whose end is open.
    pub pending: Vec<(u32, i64)>,
    /// Positions of waiting jobs that such transactions dispose of.
    pub withdrawn: Vec<(u32, i64, Outcome)>,
    pub bodies: u64,
    pub disposed: u64,
    pub last_end: i64,
    /// Contradictions between the rows, in words.
    pub faults: Vec<String>,
    /// See `Sight::Signed`.
    pub writers: HashSet<u32>,
    /// Its tables have no page.
    pub emptied: bool,
}

struct Closure {
    all: bool,
    items: Vec<u8>,
    outcome: Outcome,
    due: Option<i64>,
    closed_at: i64,
    xid: Option<u32>,
    error: Option<String>,
    result: Option<String>,
}

/// The end of a job that no attempt had.
struct Unclaimed {
    position: i64,
    outcome: Outcome,
    /// Of the transaction that wrote it, while its end is open.
    xid: Option<u32>,
}

struct Closures {
    /// By claim.
    claimed: HashMap<i64, Vec<Closure>>,
    unclaimed: Vec<Unclaimed>,
}

impl Closure {
    /// * `keep` - the error and the result too
    fn read(row: &Row, xid: Option<u32>, keep: bool) -> Result<Self> {
        use closures::column as c;
        let code = row.char(c::OUTCOME).ok_or_else(missing)?;
        let outcome = Outcome::from_code(code)
            .ok_or_else(|| Error::internal(format!("unknown outcome {code} in a closure")))?;
        let items = row.bytea(c::ITEMS);
        Ok(Self {
            all: items.is_none(),
            items: items.unwrap_or_default(),
            outcome,
            due: row.micros(c::DUE_AT),
            closed_at: row.micros(c::CLOSED_AT).ok_or_else(missing)?,
            xid,
            error: if keep { row.text(c::ERROR) } else { None },
            result: if keep { row.json_text(c::RESULT) } else { None },
        })
    }

    fn covers(&self, item: u32) -> bool {
        self.all || self.items.get(item as usize / 8).is_some_and(|b| b & (1 << (item % 8)) != 0)
    }
}

struct ClaimRow {
    header: ClaimHeader,
    attempt: i16,
    attempts: Option<Vec<i16>>,
    job_ids: Vec<i64>,
    positions: Option<Vec<i64>>,
    deadline: Option<i64>,
    deadlines: Option<Vec<Timestamp>>,
}

impl ClaimRow {
    /// * `xid` - of the transaction that wrote it, while its end is open
    fn read(row: &Row, xid: Option<u32>) -> Result<Self> {
        use claims::column as c;
        let job_ids = row.i64_array(c::JOB_IDS)?.ok_or_else(missing)?;
        Ok(Self {
            header: ClaimHeader {
                id: row.i64(c::CLAIM_ID).ok_or_else(missing)?,
                lane_id: row.i64(c::LANE_ID).ok_or_else(missing)?,
                claimed_at: row.micros(c::CLAIMED_AT).ok_or_else(missing)?,
                runtime: row.uuid(c::RUNTIME),
                priority: row.i16(c::PRIORITY),
                count: job_ids.len() as u32,
                xid,
            },
            attempt: row.i16(c::ATTEMPT).ok_or_else(missing)?,
            attempts: row.i16_array(c::ATTEMPTS)?,
            positions: row.i64_array(c::POSITIONS)?,
            deadline: row.micros(c::DEADLINE_AT),
            deadlines: row.timestamp_array(c::DEADLINES)?,
            job_ids,
        })
    }

    fn position(&self, item: usize) -> i64 {
        self.positions.as_ref().unwrap_or(&self.job_ids).get(item).copied().unwrap_or(-1)
    }

    fn attempt(&self, item: usize) -> i16 {
        self.attempts.as_ref().and_then(|a| a.get(item).copied()).unwrap_or(self.attempt)
    }

    fn deadline(&self, item: usize) -> i64 {
        let own = self.deadlines.as_ref().and_then(|d| d.get(item)).map(|at| at.0);
        own.or(self.deadline).unwrap_or(i64::MAX)
    }
}

fn missing() -> Error {
    Error::internal("a row of a segment lacks a value")
}

/// The open transaction that wrote the row, if its end is open; None to skip the row.
fn standing(row: &Row, sight: Sight, evidence: &mut Evidence) -> Option<Option<u32>> {
    if let Sight::Seen(_) = sight {
        return Some(None);
    }
    match row.fate() {
        // By hand: nothing of ours deletes rows of a segment.
        Fate::Committed if row.is_deleted() => None,
        Fate::Committed => {
            let xmin = row.xmin();
            if sight == Sight::Signed && xmin != FROZEN {
                evidence.writers.insert(xmin);
            }
            Some(None)
        }
        Fate::Aborted => None,
        Fate::InProgress(xid) => Some(Some(xid)),
    }
}

/// What `Row::xmin` says of a frozen row.
pub const FROZEN: u32 = 2;

fn snapshot(sight: Sight) -> Snapshot {
    match sight {
        Sight::Seen(snapshot) => snapshot,
        Sight::Everything | Sight::Signed => Snapshot::Any,
    }
}

/// Reads a segment.
///
/// * `below` - bodies at this position and after are left out, with all that is said of them
pub fn read(segment: u8, sight: Sight, detail: Detail, below: i64) -> Result<Evidence> {
    read_with(segment, sight, detail, below, None)
}

/// As `read`; of a sealed segment the directory says what bodies there are, unless it is of a
/// time before they were truncated: TRUNCATE asks no snapshot, and a dump whose snapshot is
/// older than that has the row of the segment as it was, but no row of its tables.
pub fn read_with(
    segment: u8,
    sight: Sight,
    detail: Detail,
    below: i64,
    directory: Option<&[Listed]>,
) -> Result<Evidence> {
    let mut evidence = Evidence { last_end: i64::MIN, ..Evidence::default() };
    // Closures first, bodies last: what is closed was claimed before, what is claimed was
    // written before, so a row that arrives between the scans is never half of a pair whose
    // other half is missed in the wrong direction.
    let Closures { claimed, unclaimed } =
        read_closures(segment, sight, detail, below, &mut evidence)?;
    let rows = read_claims(segment, sight, &mut evidence)?;
    for row in &rows {
        weigh_claim(row, &claimed, detail, below, &mut evidence);
    }
    for end in &unclaimed {
        weigh_unclaimed(end, &mut evidence);
    }
    evidence.emptied = is_emptied(segment)?;
    match directory {
        Some(chunks) if !evidence.emptied => list_bodies(chunks, &mut evidence),
        _ => read_bodies(segment, sight, below, &mut evidence)?,
    }
    find_orphans(&mut evidence);
    count_unclaimed(&unclaimed, &mut evidence);
    for chunk in evidence.chunks.values() {
        let disposed = chunk.bodies.iter().filter(|bit| chunk.disposed.contains(*bit)).count();
        evidence.disposed += disposed as u64;
    }
    Ok(evidence)
}

fn is_emptied(segment: u8) -> Result<bool> {
    for leaf in [Leaf::Ready, Leaf::Claims, Leaf::Closures] {
        if heap::relation_size_blocks(catalog::leaf(leaf, segment)?) > 0 {
            return Ok(false);
        }
    }
    Ok(true)
}

/// What a segment says about the attempts of one job; its body is not read.
///
/// Claims first: what closes one that is not seen is not asked for. A row of another job costs a
/// look at one column, and none at all in a leaf that has an index of jobs.
pub fn read_job(segment: u8, snapshot: Snapshot, job_id: i64, position: i64) -> Result<Evidence> {
    let detail = Detail::Within(position, position);
    let mut evidence = Evidence::default();
    let rows = read_claims_of(segment, snapshot, job_id, position)?;
    let items: HashMap<i64, u32> = rows
        .iter()
        .filter_map(|row| {
            let item = (0..row.job_ids.len()).find(|item| row.position(*item) == position)?;
            Some((row.header.id, item as u32))
        })
        .collect();
    let Closures { claimed, unclaimed } = read_closures_of(segment, snapshot, &items, position)?;
    for row in &rows {
        weigh_claim(row, &claimed, detail, i64::MAX, &mut evidence);
    }
    for end in &unclaimed {
        weigh_unclaimed(end, &mut evidence);
    }
    Ok(evidence)
}

/// The claims that took the job at a position.
fn read_claims_of(
    segment: u8,
    snapshot: Snapshot,
    job_id: i64,
    position: i64,
) -> Result<Vec<ClaimRow>> {
    use claims::column as c;
    let mut rows = Vec::new();
    let table = Table::open(catalog::leaf(Leaf::Claims, segment)?, LockMode::AccessShare);
    let mut take = |row: &Row| {
        if row.array_has(c::JOB_IDS, job_id) {
            let claim = ClaimRow::read(row, None)?;
            // A job that moved within the segment was claimed at another position before.
            if (0..claim.job_ids.len()).any(|item| claim.position(item) == position) {
                rows.push(claim);
            }
        }
        Ok(true)
    };
    match table.array_index(c::JOB_IDS) {
        Some(index) => table.index_array(index, job_id, snapshot, &mut take)?,
        None => table.scan(snapshot, &mut take)?,
    }
    table.close_release_lock();
    rows.sort_unstable_by_key(|row| row.header.id);
    Ok(rows)
}

/// What closes items of some claims, or the job at a position without one.
///
/// * `items` - by claim, the item whose closure is wanted
fn read_closures_of(
    segment: u8,
    snapshot: Snapshot,
    items: &HashMap<i64, u32>,
    position: i64,
) -> Result<Closures> {
    use closures::column as c;
    let mut found = Closures { claimed: HashMap::new(), unclaimed: Vec::new() };
    let (mut closed, mut ended) = (0, false);
    let table = Table::open(catalog::leaf(Leaf::Closures, segment)?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        match row.i64(c::CLAIM_ID) {
            Some(claim) => {
                let Some(item) = items.get(&claim) else { return Ok(true) };
                let closure = Closure::read(row, None, true)?;
                if closure.covers(*item) {
                    closed += 1;
                    // A completed job may have moved out after that.
                    ended |= closure.outcome.is_final() && closure.outcome != Outcome::Completed;
                    found.claimed.entry(claim).or_default().push(closure);
                }
            }
            None if row.array_has(c::POSITIONS, position) => {
                let Closure { outcome, .. } = Closure::read(row, None, false)?;
                ended |= outcome.is_final();
                found.unclaimed.push(Unclaimed { position, outcome, xid: None });
            }
            None => return Ok(true),
        }
        // Sessions fill pages of their own: the end may come before what led to it.
        Ok(!ended || closed < items.len())
    })?;
    table.close_release_lock();
    Ok(found)
}

/// A waiting job comes to its end. It is not released any more, and never claimed again.
fn weigh_unclaimed(end: &Unclaimed, evidence: &mut Evidence) {
    let (number, offset) = split(end.position);
    if end.outcome == Outcome::Kept {
        // Nobody but maintenance waits for the transaction that moves it.
        if end.xid.is_none() {
            evidence.chunks.entry(number).or_default().kept.insert(offset);
        }
        return;
    }
    match end.xid {
        Some(xid) => {
            evidence.chunks.entry(number).or_default().withdrawn.insert(offset);
            evidence.withdrawn.push((xid, end.position, end.outcome));
        }
        None => {
            dispose(evidence, end.position, end.outcome);
            evidence.chunks.entry(number).or_default().released.remove(offset);
            evidence.released.remove(&end.position);
        }
    }
}

/// Bodies tell the lanes of jobs that were never claimed.
fn count_unclaimed(unclaimed: &[Unclaimed], evidence: &mut Evidence) {
    for end in unclaimed.iter().filter(|end| end.xid.is_none()) {
        let Some(chunk) = evidence.chunks.get(&split(end.position).0) else { continue };
        if end.outcome == Outcome::Cancelled {
            evidence.ends.entry(chunk.lane_id).or_default().cancelled += 1;
        }
    }
}

fn read_closures(
    segment: u8,
    sight: Sight,
    detail: Detail,
    below: i64,
    evidence: &mut Evidence,
) -> Result<Closures> {
    use closures::column as c;
    let mut closures: HashMap<i64, Vec<Closure>> = HashMap::new();
    let mut unclaimed = Vec::new();
    let table = Table::open(catalog::leaf(Leaf::Closures, segment)?, LockMode::AccessShare);
    table.scan(snapshot(sight), |row| {
        let Some(xid) = standing(row, sight, evidence) else { return Ok(true) };
        let closure = Closure::read(row, xid, detail != Detail::None)?;
        let outcome = closure.outcome;
        if outcome.is_final() && xid.is_none() {
            evidence.last_end = evidence.last_end.max(closure.closed_at);
        }
        let Some(claim) = row.i64(c::CLAIM_ID) else {
            for position in row.i64_array(c::POSITIONS)?.unwrap_or_default() {
                if position < below {
                    unclaimed.push(Unclaimed { position, outcome, xid });
                }
            }
            return Ok(true);
        };
        closures.entry(claim).or_default().push(closure);
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(Closures { claimed: closures, unclaimed })
}

fn read_claims(segment: u8, sight: Sight, evidence: &mut Evidence) -> Result<Vec<ClaimRow>> {
    let mut rows = Vec::new();
    let table = Table::open(catalog::leaf(Leaf::Claims, segment)?, LockMode::AccessShare);
    table.scan(snapshot(sight), |row| {
        let Some(xid) = standing(row, sight, evidence) else { return Ok(true) };
        rows.push(ClaimRow::read(row, xid)?);
        Ok(true)
    })?;
    table.close_release_lock();
    // Receipts grow with time: the latest attempt of a job comes last.
    rows.sort_unstable_by_key(|row| row.header.id);
    Ok(rows)
}

fn dispose(evidence: &mut Evidence, position: i64, outcome: Outcome) -> bool {
    let (number, offset) = split(position);
    let chunk = evidence.chunks.entry(number).or_default();
    let fresh = chunk.disposed.insert(offset);
    if fresh && outcome == Outcome::Completed {
        chunk.completed.insert(offset);
    }
    if !fresh {
        evidence.faults.push(format!("job at position {position} has two final dispositions"));
    }
    fresh
}

fn weigh_claim(
    row: &ClaimRow,
    closures: &HashMap<i64, Vec<Closure>>,
    detail: Detail,
    below: i64,
    evidence: &mut Evidence,
) {
    let claim = evidence.claims.len();
    let mut listed = false;
    let closures = closures.get(&row.header.id).map_or(&[][..], Vec::as_slice);
    for item in 0..row.job_ids.len() {
        let position = row.position(item);
        if position >= below || position < 0 {
            continue;
        }
        let (number, offset) = split(position);
        let receipt = row.header.id + item as i64;
        // Of several closures the first written wins.
        let mut covering = closures.iter().filter(|c| c.covers(item as u32));
        let closure = covering.next();
        if covering.next().is_some() {
            evidence.faults.push(format!("receipt {receipt} was closed twice"));
        }
        // A later attempt makes an earlier release history.
        if evidence.released.remove(&position).is_some() {
            evidence.chunks.entry(number).or_default().released.remove(offset);
        }
        match closure {
            Some(closure) if closure.xid.is_none() => {
                weigh_closure(row, item, closure, evidence);
                if detail.has(position) {
                    evidence.attempts.entry(position).or_default().push(AttemptEnd {
                        receipt,
                        attempt: row.attempt(item),
                        runtime: row.header.runtime,
                        priority: row.header.priority,
                        claimed_at: row.header.claimed_at,
                        closed_at: closure.closed_at,
                        outcome: closure.outcome,
                        error: closure.error.clone(),
                        result: closure.result.clone(),
                    });
                }
            }
            other => {
                if !evidence.chunks.entry(number).or_default().open.insert(offset) {
                    evidence.faults.push(format!("job at position {position} is claimed twice"));
                }
                evidence.open.push(OpenItem {
                    claim,
                    receipt,
                    position,
                    job_id: row.job_ids[item],
                    attempt: row.attempt(item),
                    deadline: row.deadline(item),
                    closing: other.and_then(|c| Some((c.xid?, c.outcome, c.due))),
                });
                listed = true;
            }
        }
    }
    if listed {
        evidence.claims.push(row.header);
    }
}

fn weigh_closure(row: &ClaimRow, item: usize, closure: &Closure, evidence: &mut Evidence) {
    let position = row.position(item);
    let outcome = closure.outcome;
    if outcome.is_final() {
        if dispose(evidence, position, outcome) {
            let ends = evidence.ends.entry(row.header.lane_id).or_default();
            match outcome {
                Outcome::Completed => ends.completed += 1,
                Outcome::Failed | Outcome::DeadLettered => ends.failed += 1,
                Outcome::Cancelled => ends.cancelled += 1,
                _ => {}
            }
        }
        return;
    }
    let (number, offset) = split(position);
    evidence.chunks.entry(number).or_default().released.insert(offset);
    let used = row.attempt(item) - i16::from(!outcome.counts_attempt());
    evidence.released.insert(
        position,
        Released {
            receipt: row.header.id + item as i64,
            attempts: used,
            due: closure.due.unwrap_or(closure.closed_at),
            snoozed: outcome == Outcome::Snoozed,
        },
    );
}

fn read_bodies(segment: u8, sight: Sight, below: i64, evidence: &mut Evidence) -> Result<()> {
    use body::column as c;
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    table.scan(snapshot(sight), |row| {
        let Some(xid) = standing(row, sight, evidence) else { return Ok(true) };
        let position = row.i64(c::POSITION).ok_or_else(missing)?;
        if position >= below {
            return Ok(true);
        }
        let lane_id = row.i64(c::LANE_ID).ok_or_else(missing)?;
        let created_at = row.micros(c::CREATED_AT).ok_or_else(missing)?;
        let due = row.micros(c::RUN_AT).unwrap_or(created_at);
        let (number, offset) = split(position);
        let chunk = evidence.chunks.entry(number).or_default();
        if chunk.bodies.is_empty() && chunk.pending == 0 {
            chunk.lane_id = lane_id;
            chunk.born = due;
        } else if chunk.lane_id != lane_id {
            evidence.faults.push(format!("chunk {number} has jobs of two lanes"));
        }
        chunk.born = chunk.born.min(due);
        match xid {
            Some(xid) => {
                chunk.pending += 1;
                evidence.pending.push((xid, position));
            }
            None => {
                evidence.bodies += 1;
                if !chunk.bodies.insert(offset) {
                    evidence.faults.push(format!("position {position} has two bodies"));
                }
            }
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(())
}

fn list_bodies(chunks: &[Listed], evidence: &mut Evidence) {
    for listed in chunks {
        let chunk = evidence.chunks.entry(listed.number).or_default();
        chunk.lane_id = listed.lane_id;
        chunk.born = listed.born;
        chunk.bodies = listed.bodies;
        evidence.bodies += u64::from(listed.bodies.count());
    }
}

/// Evidence about bodies that are not there: the leaf was written by hand.
fn find_orphans(evidence: &mut Evidence) {
    for (number, chunk) in &evidence.chunks {
        if chunk.bodies.is_empty() && chunk.pending == 0 {
            evidence.faults.push(format!("chunk {number} has evidence but no bodies"));
        } else if chunk.pending == 0 && !chunk.is_embodied() {
            evidence.faults.push(format!("chunk {number} has evidence of jobs without a body"));
        }
    }
}
