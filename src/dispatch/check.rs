//! `awa.check()`: memory against the tables, in a consistent cut.
//!
//! Memory is copied, the tables are read, and the change counter is compared: when nothing
//! moved in between, both show the same moment. Under traffic that is tried again.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::session::{attach, with_open};
use super::{key_check, place_check};
use crate::domain::bits::Bits;
use crate::domain::dispatcher::Dispatcher;
use crate::domain::entities::{
    AS_BODY, Counts, Db, Item, Mark, QueueName, ReleaseState, SEGMENTS, split,
};
use crate::domain::page::PAGE_CHUNKS;
use crate::error::Result;
use crate::pg::debug_point::debug_point;
use crate::pg::snapshot::Snapshot;
use crate::pg::{latch, xact};
use crate::store::evidence::{self, Detail, Evidence, Sight};
use crate::store::lanes::LaneRow;
use crate::store::{attempts, body, deferred, dlq, lanes, queues, segments};

/// How long a pause in the traffic is waited for, microseconds.
const PATIENCE: i64 = 20_000_000;

pub struct Finding {
    pub invariant: &'static str,
    /// In words; none: the invariant holds.
    pub faults: Vec<String>,
}

/// What memory says about one chunk.
#[derive(Clone, Copy, Default)]
struct MemoryChunk {
    ready: Bits,
    live: u16,
    in_flight: u16,
    cold: bool,
    segment: u8,
}

struct MemoryItem {
    position: i64,
    committed: bool,
    prior: i16,
    mark: Mark,
}

struct MemoryRelease {
    chunk: i64,
    bits: Bits,
    prior: i16,
    due: i64,
}

/// A copy of what memory says about a database.
struct Memory {
    changes: u64,
    next_receipt: i64,
    chunks: BTreeMap<i64, MemoryChunk>,
    items: HashMap<i64, MemoryItem>,
    releases: Vec<MemoryRelease>,
    counts: BTreeMap<String, Counts>,
}

/// Proves the invariants, or says what is wrong.
pub fn run() -> Result<Vec<Finding>> {
    let db = attach()?;
    let until = xact::micros() + PATIENCE;
    let mut waited = false;
    loop {
        // What is due now would move while we look.
        let memory = copy(db)?;
        debug_point!("check_copied", interruptible);
        let tables = Tables::read()?;
        let quiet = with_open(|d, db| d.base(db).changes == memory.changes)?;
        if quiet {
            let findings = compare(&memory, &tables)?;
            if waited || findings.iter().all(|finding| finding.faults.is_empty()) {
                return Ok(findings);
            }
            // A row can be visible a moment before its transaction's callback has told
            // memory: its lock on its own xid is released after that.
            tables.writers().for_each(xact::wait_for_xid);
            latch::wait(20);
            waited = true;
            continue;
        }
        waited = false;
        if xact::micros() >= until {
            return Ok(vec![Finding {
                invariant: "consistent cut",
                faults: vec!["traffic did not pause long enough to compare".to_owned()],
            }]);
        }
        latch::wait(20);
    }
}

/// Flat copies, for which room is made before the lock is taken.
#[derive(Default)]
struct Raw {
    chunks: Vec<(i64, MemoryChunk)>,
    items: Vec<(i64, MemoryItem)>,
    releases: Vec<MemoryRelease>,
    counts: Vec<(QueueName, Counts)>,
}

/// How many of each there are: chunks, items, releases, queues.
fn sizes(d: &Dispatcher<'_>) -> [usize; 4] {
    let cold = d.pages.used() * PAGE_CHUNKS;
    [d.chunks.used() + cold, d.items.used(), d.releases.used(), d.queues.used()]
}

impl Raw {
    fn has_room(&self, [chunks, items, releases, queues]: [usize; 4]) -> bool {
        self.chunks.capacity() >= chunks
            && self.items.capacity() >= items
            && self.releases.capacity() >= releases
            && self.counts.capacity() >= queues
    }

    /// Makes room for all there is, and for some that may come meanwhile.
    fn make_room(&mut self) {
        let [chunks, items, releases, queues] =
            super::with(|d| sizes(d)).map(|count| count + count / 8 + 64);
        self.chunks.reserve(chunks);
        self.items.reserve(items);
        self.releases.reserve(releases);
        self.counts.reserve(queues);
    }

    /// The change counter that the copies belong to, and the next receipt; None when there was too little room.
    fn fill(&mut self, d: &mut Dispatcher<'_>, db: Db) -> Option<(u64, i64)> {
        if !self.has_room(sizes(d)) {
            return None;
        }
        for at in d.chunks.indexes() {
            let chunk = &d.chunks[at];
            if chunk.db == db {
                let copy = MemoryChunk {
                    ready: chunk.bits,
                    live: chunk.live,
                    in_flight: chunk.in_flight,
                    cold: false,
                    segment: chunk.segment,
                };
                self.chunks.push((chunk.number, copy));
            }
        }
        d.for_each_cold(db, |number, segment, ready| {
            let chunk = MemoryChunk { live: ready, cold: true, segment, ..MemoryChunk::default() };
            self.chunks.push((number, chunk));
        });
        for at in d.items.indexes() {
            let item = &d.items[at];
            if item.db == db {
                let committed = d.claims[item.claim].committed;
                let Item { position, prior, mark, .. } = *item;
                let entry = MemoryItem { position, committed, prior, mark };
                self.items.push((item.receipt, entry));
            }
        }
        for at in d.releases.indexes() {
            let release = &d.releases[at];
            if release.db == db && release.state != ReleaseState::Pending {
                self.releases.push(MemoryRelease {
                    chunk: release.chunk,
                    bits: release.bits,
                    prior: release.prior,
                    due: release.timer.at,
                });
            }
        }
        for at in d.queues.indexes() {
            let queue = &d.queues[at];
            if queue.db == db && queue.counts != Counts::default() {
                self.counts.push((queue.copy_name(), queue.counts));
            }
        }
        let database = d.base(db);
        Some((database.changes, database.next_receipt))
    }
}

fn copy(db: Db) -> Result<Memory> {
    let mut raw = Raw::default();
    let (changes, next_receipt) = loop {
        raw.make_room();
        if let Some(moment) = with_open(|d, _| raw.fill(d, db))? {
            break moment;
        }
    };
    let counts = raw.counts.into_iter().map(|(name, c)| (name.as_str().to_owned(), c));
    load_cold(Memory {
        changes,
        next_receipt,
        chunks: raw.chunks.into_iter().collect(),
        items: raw.items.into_iter().collect(),
        releases: raw.releases,
        counts: counts.collect(),
    })
}

/// The jobs of cold chunks are those that their committed rows show.
fn load_cold(mut memory: Memory) -> Result<Memory> {
    for (number, chunk) in &mut memory.chunks {
        if chunk.cold {
            chunk.ready = body::read_offsets(chunk.segment, *number)?;
        }
    }
    Ok(memory)
}

struct Tables {
    segments: Vec<Evidence>,
    known: [segments::Known; SEGMENTS],
    lanes: HashMap<i64, LaneRow>,
    deferred: HashMap<String, Counts>,
    totals: Vec<queues::Totals>,
    /// What is written about open attempts, by receipt.
    marks: HashMap<i64, Mark>,
    keys: key_check::Keys,
    places: place_check::Places,
}

impl Tables {
    fn read() -> Result<Self> {
        let mut segments = Vec::with_capacity(SEGMENTS);
        for segment in 0..SEGMENTS as u8 {
            segments.push(evidence::read(segment, Sight::Signed, Detail::None, i64::MAX)?);
        }
        let marks: HashMap<i64, Mark> = attempts::read_all(Snapshot::SelfNow)?
            .into_iter()
            .map(|(receipt, note)| (receipt, note.mark()))
            .collect();
        Ok(Self {
            known: segments::read_known()?,
            keys: key_check::Keys::read(&segments, &marks)?,
            places: place_check::Places::read(&segments)?,
            segments,
            lanes: lanes::read_all(Snapshot::SelfNow)?,
            deferred: deferred::count(Snapshot::SelfNow)?,
            totals: queues::read_totals()?,
            marks,
        })
    }
}

impl Tables {
    fn is_parked(&self, receipt: i64) -> bool {
        self.marks.get(&receipt).is_some_and(Mark::is_parked)
    }

    /// The transactions that wrote what was read.
    fn writers(&self) -> impl Iterator<Item = u32> {
        let known = self.known.iter().map(|k| k.writer).filter(|xid| *xid > evidence::FROZEN);
        self.segments.iter().flat_map(|s| s.writers.iter().copied()).chain(known)
    }
}

/// At most so many faults are told one by one.
const TOLD: usize = 20;

struct Faults(Vec<String>);

impl Faults {
    fn push(&mut self, fault: impl FnOnce() -> String) {
        if self.0.len() < TOLD {
            self.0.push(fault());
        }
    }
}

fn compare(memory: &Memory, tables: &Tables) -> Result<Vec<Finding>> {
    let contradictions: Vec<String> =
        tables.segments.iter().flat_map(|s| s.faults.iter().cloned()).take(TOLD).collect();
    Ok(vec![
        Finding {
            invariant: "rows of a segment do not contradict each other",
            faults: contradictions,
        },
        Finding {
            invariant: "directories and summaries of segments equal their rows",
            faults: compare_known(tables).0,
        },
        Finding {
            invariant: "every live job is in exactly one place",
            faults: compare_places(memory, tables).0,
        },
        Finding {
            invariant: "no job is in two tables",
            faults: tables.places.compare(&tables.segments, TOLD),
        },
        Finding {
            invariant: "a receipt is issued once",
            faults: place_check::compare_receipts(&tables.segments, memory.next_receipt, TOLD)?,
        },
        Finding {
            invariant: "every open attempt is open in memory",
            faults: compare_items(memory, tables).0,
        },
        Finding {
            invariant: "parked attempts and requests to stop are those of open attempts",
            faults: compare_marks(memory, tables).0,
        },
        Finding {
            invariant: "released jobs have the attempts and times of their closures",
            faults: compare_releases(memory, tables).0,
        },
        Finding {
            invariant: "counts of queues equal counts by scan",
            faults: compare_counts(memory, tables).0,
        },
        Finding {
            invariant: "totals of queues have what the segments say they count",
            faults: compare_totals(tables).0,
        },
        Finding {
            invariant: "counts of dead letters equal counts by scan",
            faults: dlq::miscounted()?,
        },
        Finding {
            invariant: "a unique key is held if and only if a job in a masked state exists for it",
            faults: tables.keys.compare(TOLD),
        },
    ])
}

/// What a start would believe instead of reading the rows.
fn compare_known(tables: &Tables) -> Faults {
    let mut faults = Faults(Vec::new());
    for (number, (known, evidence)) in tables.known.iter().zip(&tables.segments).enumerate() {
        // All were disposed and counted before a dump, and truncated while it began.
        if known.summary.is_some() && evidence.emptied {
            continue;
        }
        if let Some(listed) = &known.directory
            && !evidence.directory().eq(listed.iter().copied())
        {
            faults.push(|| format!("the directory of segment {number} is not that of its rows"));
        }
        if let Some(summary) = &known.summary {
            let same = summary.bodies == evidence.bodies
                && evidence.disposed == evidence.bodies
                && evidence.open.is_empty()
                && known.counted.ends == evidence.ends;
            if !same {
                faults.push(|| format!("the summary of segment {number} is not that of its rows"));
            }
        }
    }
    faults
}

/// Every committed body without a final disposition is ready, released or claimed, and
/// memory has no other job.
fn compare_places(memory: &Memory, tables: &Tables) -> Faults {
    let mut faults = Faults(Vec::new());
    let mut places: BTreeMap<i64, Bits> = BTreeMap::new();
    let mut put = |chunk: i64, offset: u16, faults: &mut Faults| {
        if !places.entry(chunk).or_default().insert(offset) {
            faults.push(|| format!("job {offset} of chunk {chunk} is in two places"));
        }
    };
    for (number, chunk) in &memory.chunks {
        for offset in chunk.ready.iter() {
            put(*number, offset, &mut faults);
        }
    }
    for release in &memory.releases {
        for offset in release.bits.iter() {
            put(release.chunk, offset, &mut faults);
        }
    }
    for item in memory.items.values() {
        let (chunk, offset) = split(item.position);
        put(chunk, offset, &mut faults);
    }
    for (number, chunk) in tables.segments.iter().flat_map(|s| &s.chunks) {
        let known = places.remove(number).unwrap_or_default();
        for offset in chunk.bodies.iter() {
            let live = !chunk.disposed.contains(offset);
            match (live, known.contains(offset)) {
                (true, false) => faults
                    .push(|| format!("live job {offset} of chunk {number} is nowhere in memory")),
                (false, true) => {
                    faults.push(|| format!("disposed job {offset} of chunk {number} is in memory"))
                }
                _ => {}
            }
        }
        for offset in known.iter().filter(|offset| !chunk.bodies.contains(*offset)) {
            faults.push(|| format!("job {offset} of chunk {number} is in memory but has no body"));
        }
        if let Some(entry) = memory.chunks.get(number)
            && (entry.live != chunk.live() || entry.in_flight < chunk.pending)
        {
            faults.push(|| {
                format!(
                    "chunk {number} counts {} live and {} in flight, its rows {} and {}",
                    entry.live,
                    entry.in_flight,
                    chunk.live(),
                    chunk.pending
                )
            });
        }
    }
    for (number, bits) in places.iter().filter(|(_, bits)| !bits.is_empty()) {
        faults.push(|| format!("memory has {} jobs of chunk {number} without rows", bits.count()));
    }
    faults
}

fn compare_items(memory: &Memory, tables: &Tables) -> Faults {
    let mut faults = Faults(Vec::new());
    let mut known = 0;
    for item in tables.segments.iter().flat_map(|s| {
        // Claims of open transactions are not claimed yet as far as others can tell.
        s.open.iter().filter(|i| s.claims.get(i.claim).is_none_or(|c| c.xid.is_none()))
    }) {
        match memory.items.get(&item.receipt) {
            None => faults.push(|| format!("open receipt {} is not in memory", item.receipt)),
            Some(entry) => {
                known += 1;
                let attempt = entry.prior.max(0) + 1;
                if entry.position != item.position || attempt != item.attempt {
                    faults.push(|| {
                        format!(
                            "receipt {} is attempt {} at {} in memory, {} at {} in its row",
                            item.receipt, attempt, entry.position, item.attempt, item.position
                        )
                    });
                }
            }
        }
    }
    let committed = memory.items.values().filter(|i| i.committed).count();
    if committed != known {
        faults.push(|| format!("memory has {committed} open attempts, the tables {known}"));
    }
    faults
}

fn compare_marks(memory: &Memory, tables: &Tables) -> Faults {
    let mut faults = Faults(Vec::new());
    let open: HashSet<i64> =
        tables.segments.iter().flat_map(|s| &s.open).map(|item| item.receipt).collect();
    for receipt in tables.marks.keys().filter(|receipt| !open.contains(receipt)) {
        faults.push(|| format!("something is written about receipt {receipt}, which is not open"));
    }
    // Memory knows earlier than the row that an owner has gone.
    let told = |mark: &Mark| (mark.asked, mark.is_parked(), mark.until);
    for (receipt, item) in memory.items.iter().filter(|(_, item)| item.committed) {
        let row = tables.marks.get(receipt).copied().unwrap_or_default();
        if told(&item.mark) != told(&row) {
            let kept = item.mark;
            faults.push(|| format!("receipt {receipt} is {kept:?} in memory, {row:?} in its row"));
        }
    }
    faults
}

fn compare_releases(memory: &Memory, tables: &Tables) -> Faults {
    let mut faults = Faults(Vec::new());
    for release in memory.releases.iter().filter(|r| r.prior != AS_BODY) {
        for offset in release.bits.iter() {
            let at = crate::domain::entities::position(release.chunk, offset);
            let row = tables.segments.iter().find_map(|s| s.released.get(&at));
            if let Some(row) = row
                && row.attempts != release.prior
            {
                faults.push(|| {
                    format!(
                        "job at {at} has used {} attempts in memory, {} in its row (due {}, {})",
                        release.prior, row.attempts, release.due, row.due
                    )
                });
            }
        }
    }
    faults
}

/// What a scan counts for each queue.
fn scan_counts(tables: &Tables, now: i64) -> BTreeMap<String, Counts> {
    let mut counts: BTreeMap<String, Counts> = BTreeMap::new();
    let name = |lane: &i64| tables.lanes.get(lane).map_or("?", |l| &l.queue).to_owned();
    for (segment, known) in tables.segments.iter().zip(&tables.known) {
        for chunk in segment.chunks.values() {
            counts.entry(name(&chunk.lane_id)).or_default().available +=
                i64::from(chunk.ready().count());
        }
        for item in &segment.open {
            let Some(claim) = segment.claims.get(item.claim) else { continue };
            let entry = counts.entry(name(&claim.lane_id)).or_default();
            if claim.xid.is_none() && tables.is_parked(item.receipt) {
                entry.waiting_external += 1;
            } else if claim.xid.is_none() {
                entry.running += 1;
            } else {
                entry.available += 1;
            }
        }
        for (at, job) in &segment.released {
            let Some(chunk) = segment.chunks.get(&split(*at).0) else { continue };
            let entry = counts.entry(name(&chunk.lane_id)).or_default();
            if job.due <= now {
                entry.available += 1;
            } else if job.snoozed {
                entry.scheduled += 1;
            } else {
                entry.retryable += 1;
            }
        }
        for (lane, ends) in evidence::uncounted(&segment.ends, &known.counted.ends) {
            let entry = counts.entry(name(&lane)).or_default();
            entry.completed += ends.completed;
            entry.failed += ends.failed;
            entry.cancelled += ends.cancelled;
        }
    }
    for (queue, deferred) in &tables.deferred {
        let entry = counts.entry(queue.clone()).or_default();
        entry.scheduled += deferred.scheduled;
        entry.retryable += deferred.retryable;
    }
    counts.retain(|_, c| *c != Counts::default());
    counts
}

/// Totals only grow, and the ends that a segment still shows are among them.
fn compare_totals(tables: &Tables) -> Faults {
    let mut faults = Faults(Vec::new());
    let mut counted: BTreeMap<&str, evidence::Ends> = BTreeMap::new();
    for (lane, ends) in tables.known.iter().flat_map(|k| &k.counted.ends) {
        match tables.lanes.get(lane) {
            Some(lane) => counted.entry(&lane.queue).or_default().add(*ends),
            None => faults.push(|| format!("ends of lane {lane} are counted, which has no row")),
        }
    }
    let totals: HashMap<&str, evidence::Ends> =
        tables.totals.iter().map(|t| (t.queue.as_str(), t.ends)).collect();
    for (queue, counted) in counted {
        let left = totals.get(queue).copied().unwrap_or_default().minus(counted);
        if left.completed < 0 || left.failed < 0 || left.cancelled < 0 {
            faults.push(|| format!("the totals of queue \"{queue}\" lack ends: {left:?}"));
        }
    }
    faults
}

fn compare_counts(memory: &Memory, tables: &Tables) -> Faults {
    let mut faults = Faults(Vec::new());
    let counts = scan_counts(tables, xact::micros());
    // A job whose time has just come is on its way from one column to the other.
    let waiting = |c: &Counts| c.available + c.retryable + c.scheduled;
    let ends = |c: &Counts| (c.running, c.waiting_external, c.completed, c.failed, c.cancelled);
    for name in counts.keys().chain(memory.counts.keys().filter(|n| !counts.contains_key(*n))) {
        let scanned = counts.get(name).copied().unwrap_or_default();
        let kept = memory.counts.get(name).copied().unwrap_or_default();
        if waiting(&scanned) != waiting(&kept) || ends(&scanned) != ends(&kept) {
            faults.push(|| format!("queue \"{name}\": memory {kept:?}, scan {scanned:?}"));
        }
    }
    faults
}
