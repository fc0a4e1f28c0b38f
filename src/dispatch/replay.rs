//! Rebuilding memory from the tables: at start, after a crash, after promotion, and when
//! memory cannot be trusted.
//!
//! Producers go on meanwhile: their chunks lie above a floor, replay restores those below.
//! Claims and closes wait. The worker of the database runs it.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use super::session::{attach, capacity};
use crate::domain::bits::Bits;
use crate::domain::dispatcher::{Full, LaneName, Restored};
use crate::domain::entities::{Counts, Db, Doubt, Item, Liveness, Phase, Runtime, position, split};
use crate::domain::undo::{Act, End};
use crate::error::{Error, Result};
use crate::pg::debug_point::debug_point;
use crate::pg::{catalog, guc, latch, lock, snapshot::Snapshot, xact};
use crate::store::evidence::{self, ChunkEvidence, Detail, Evidence, Sight};
use crate::store::identity::{self, Settled};
use crate::store::lanes::LaneRow;
use crate::store::outcome::Outcome;
use crate::store::{attempts, chunks, deferred, epochs, lanes, queues, runtimes, segments};

/// What a replay has found; `finish` lets claims go on with it, once the transaction that
/// wrote the epoch has been committed and flushed.
pub struct Replayed {
    db: Db,
    receipts: (i64, i64),
    next_deferred: i64,
    pub jobs: u64,
    pub open: u64,
    pub faults: Vec<String>,
    pub settled: Settled,
}

/// Whether memory of this database has to be rebuilt.
pub fn is_due() -> Result<bool> {
    let db = attach()?;
    Ok(super::with(|d| {
        let database = d.base(db);
        database.phase != Phase::Open || database.replay_due
    }))
}

/// Asks the worker for a rebuild. Returns what `is_done_since` wants.
pub fn request(db: Db) -> u64 {
    super::with(|d| {
        d.base(db).replay_due = true;
        d.wake_worker_for(db, i64::MIN);
        d.base(db).generation
    })
}

/// Whether memory was rebuilt since.
pub fn is_done_since(db: Db, before: u64) -> bool {
    super::with(|d| {
        let database = d.base(db);
        database.generation != before && database.phase == Phase::Open && !database.replay_due
    })
}

/// Keeps replays away until this transaction has ended and told memory; false when one runs.
/// The lock goes after the callbacks of commit (CommitTransaction, xact.c).
pub fn try_exclude() -> Result<bool> {
    Ok(lock::try_hold_key(catalog::relation("boot_epochs")?, 0))
}

/// Reads the tables into memory. None: another session is at it, and its transaction is
/// still open.
pub fn run() -> Result<Option<Replayed>> {
    let db = attach()?;
    // Two that fill memory at a time would fill it twice.
    if !try_exclude()? {
        return Ok(None);
    }
    if !is_due()? {
        // It has just been done.
        return Ok(None);
    }
    if !segments::seed()? {
        return Ok(None);
    }
    let settled = identity::settle()?;
    begin(db)?;
    let floor = super::with(|d| d.base(db).floor);
    let names = lanes::read_all(Snapshot::Any)?;
    restore_runtimes(db)?;
    let mut replayed = Replayed {
        db,
        receipts: (0, 0),
        next_deferred: i64::MAX,
        jobs: 0,
        open: 0,
        faults: Vec::new(),
        settled,
    };
    restore_settings(db)?;
    restore_deferred(db, position(floor, 0))?;
    let marks = attempts::read_marks()?;
    for (segment, known) in segments::read_known()?.into_iter().enumerate() {
        let restored = Segment {
            db,
            segment: segment as u8,
            names: &names,
            marks: &marks,
            first_receipt: replayed.settled.first_receipt,
        };
        if let Some(summary) = known.summary {
            restored.restore_summary(&summary);
            continue;
        }
        let evidence = evidence::read_with(
            segment as u8,
            Sight::Everything,
            Detail::None,
            position(floor, 0),
            known.directory.as_deref(),
        )?;
        restored.restore(&evidence, &known.counted.ends)?;
        if evidence.emptied && known.directory.is_some_and(|chunks| !chunks.is_empty()) {
            replayed.faults.push(format!(
                "the jobs of segment {segment} were truncated before they were dumped"
            ));
        }
        replayed.jobs += evidence.bodies - evidence.disposed;
        replayed.open += evidence.open.len() as u64;
        replayed.faults.extend(evidence.faults);
    }
    replayed.next_deferred = deferred::next_run_at(i64::MIN)?.unwrap_or(i64::MAX);
    replayed.receipts = epochs::write_next(xact::micros())?;
    xact::force_synchronous_commit();
    Ok(Some(replayed))
}

fn finish(replayed: &Replayed) {
    super::with(|d| {
        if replayed.settled.copied_from.is_some() {
            d.distrust_settings(replayed.db);
        }
        d.finish_replay(replayed.db, replayed.receipts, replayed.next_deferred);
        // Transactions in doubt may have ended while we read.
        d.base(replayed.db).doubts_due = true;
    });
}

thread_local! {
    /// What this transaction's commit lets go on.
    static REPLAYED: RefCell<Option<Replayed>> = const { RefCell::new(None) };
    static RENEWED: Cell<Option<(Db, (i64, i64))>> = const { Cell::new(None) };
}

/// Lets claims and closes go on once this transaction has committed and flushed.
pub fn finish_at_commit(replayed: Replayed) {
    xact::arm();
    REPLAYED.set(Some(replayed));
}

/// Puts new receipts into use once this transaction has committed and flushed.
pub fn renew_at_commit(db: Db, receipts: (i64, i64)) {
    xact::arm();
    RENEWED.set(Some((db, receipts)));
}

/// For the commit callback.
pub(super) fn committed() {
    if let Some(replayed) = REPLAYED.take() {
        finish(&replayed);
    }
    if let Some((db, receipts)) = RENEWED.take() {
        super::with(|d| d.renew_receipts(db, receipts));
    }
}

/// For the abort callback.
pub(super) fn aborted() {
    REPLAYED.set(None);
    RENEWED.set(None);
}

/// The first replay of a start fills what is empty; any later one starts over.
fn begin(db: Db) -> Result<()> {
    let first = super::with(|d| !core::mem::replace(&mut d.base(db).replayed, true));
    if first {
        return Ok(());
    }
    let (states, current) = segments::read_states()?;
    let block = chunks::fresh_block()?;
    super::with(|d| d.begin_rebuild(db, block, &states, current));
    debug_point!("rebuild_begun", interruptible);
    wait_for_stragglers(db);
    Ok(())
}

/// How long replay waits for producers that were about to write, microseconds.
const STRAGGLERS: i64 = 5_000_000;

/// Producers got their places before the rebuild began: replay must not pass by their rows.
fn wait_for_stragglers(db: Db) {
    let until = xact::micros() + STRAGGLERS;
    while super::with(|d| d.stragglers(db)) > 0 {
        if xact::micros() >= until {
            return super::with(|d| d.leave_stragglers(db));
        }
        latch::wait(1);
    }
}

/// Settings that a prepared transaction changes, a pause among them, are read again when it
/// commits: its own backend is gone, and memory may have read the row before.
fn restore_settings(db: Db) -> Result<()> {
    for (xid, queue) in queues::read_pending()? {
        super::with(|d| {
            let queue = d.ensure_queue(db, &queue)?;
            d.restore_doubt(Doubt { db, xid, order: 0, act: Act::Configure { queue } })
        })
        .map_err(capacity)?;
    }
    Ok(())
}

/// Jobs on disk: those deferred since the floor was set are counted by their commits.
fn restore_deferred(db: Db, below: i64) -> Result<()> {
    let (counts, pending) = deferred::count_all(below)?;
    for (queue, counts) in counts {
        super::with(|d| d.restore_counts(db, &queue, &counts)).map_err(capacity)?;
    }
    for row in pending {
        super::with(|d| {
            let queue = d.ensure_queue(db, &row.queue)?;
            let retryable = row.kind == deferred::Kind::Retryable;
            let act = Act::Defer { queue, retryable, count: row.change, due: row.run_at };
            d.restore_doubt(Doubt { db, xid: row.xid, order: 0, act })
        })
        .map_err(capacity)?;
    }
    Ok(())
}

/// Heartbeat runtimes outlive a restart: nobody can have heard them meanwhile, so each
/// gets a full period. Session runtimes died with their connections.
fn restore_runtimes(db: Db) -> Result<()> {
    let now = xact::micros();
    for (id, timeout) in runtimes::read_heartbeats()? {
        let runtime = Runtime {
            db,
            liveness: Liveness::Heartbeat,
            dead: false,
            id,
            proc: 0,
            pid: 0,
            timeout,
            timer: Default::default(),
            last_seen: now,
            claims: crate::domain::table::NIL,
            open: 0,
            asked: false,
        };
        super::with(|d| match d.runtime(db, &id) {
            Some(_) => Ok(()),
            None => d.register(runtime, now).map(|_| ()),
        })
        .map_err(capacity)?;
    }
    Ok(())
}

/// Releases of open transactions: those of one chunk with the same attempts and time were
/// made together.
type Releases = HashMap<(u32, i64, i16, bool, i64), u32>;

/// One segment on its way into memory.
struct Segment<'a> {
    db: Db,
    segment: u8,
    names: &'a HashMap<i64, LaneRow>,
    /// What is written about open attempts.
    marks: &'a attempts::Marks,
    /// Older ones were issued by another database.
    first_receipt: i64,
}

/// The owner of attempts that began in another database: it has no runtime here.
const ELSEWHERE: [u8; 16] = [0; 16];

impl Segment<'_> {
    fn name(&self, lane_id: i64) -> Result<LaneName<'_>> {
        let row = self.names.get(&lane_id).ok_or_else(|| {
            Error::internal(format!("lane {lane_id} of segment {} has no row", self.segment))
        })?;
        Ok(LaneName {
            queue: &row.queue,
            priority: row.priority,
            shard: row.shard,
            id: lane_id,
            durable: row.durable,
        })
    }

    fn restore(&self, evidence: &Evidence, counted: &segments::EndsOfLanes) -> Result<()> {
        let Self { db, segment, .. } = *self;
        for (number, chunk) in &evidence.chunks {
            self.restore_chunk(*number, chunk)?;
        }
        self.restore_pending(evidence)?;
        self.restore_open(evidence)?;
        self.restore_released(evidence)?;
        self.restore_withdrawn(evidence)?;
        self.restore_ends(&evidence::uncounted(&evidence.ends, counted))?;
        super::with(|d| {
            let entry = &mut d.base(db).segments[usize::from(segment)];
            entry.bodies += evidence.bodies;
            entry.last_end = entry.last_end.max(evidence.last_end);
            // Some of its ends may be counted by nobody yet.
            entry.changes += 1;
        });
        Ok(())
    }

    /// A segment without an undisposed job, whose ends are counted.
    fn restore_summary(&self, summary: &segments::Summary) {
        super::with(|d| {
            let entry = &mut d.base(self.db).segments[usize::from(self.segment)];
            entry.bodies += summary.bodies;
            entry.last_end = entry.last_end.max(summary.last_end);
        });
    }

    fn restore_ends(&self, ends: &[(i64, evidence::Ends)]) -> Result<()> {
        for (lane_id, ends) in ends {
            let counts = Counts {
                completed: ends.completed,
                failed: ends.failed,
                cancelled: ends.cancelled,
                ..Counts::default()
            };
            let queue = self.name(*lane_id)?.queue;
            super::with(|d| d.restore_counts(self.db, queue, &counts)).map_err(capacity)?;
        }
        Ok(())
    }

    fn restore_chunk(&self, number: i64, chunk: &ChunkEvidence) -> Result<()> {
        let live = chunk.live();
        if live == 0 && chunk.pending == 0 {
            return Ok(());
        }
        let restored = Restored {
            number,
            segment: self.segment,
            born: chunk.born,
            ready: chunk.ready(),
            live,
            in_flight: chunk.pending,
            untouched: chunk.is_untouched(),
        };
        let name = self.name(chunk.lane_id)?;
        super::with(|d| d.restore_chunk(self.db, &name, &restored)).map_err(capacity)
    }

    /// Bodies of transactions that are prepared, or open since before the rebuild. Those of
    /// one transaction that lie side by side are one act, as when they were enqueued.
    fn restore_pending(&self, evidence: &Evidence) -> Result<()> {
        let mut pending = evidence.pending.clone();
        pending.sort_unstable();
        let next_to = |a: &(u32, i64), b: &(u32, i64)| {
            a.0 == b.0 && a.1 + 1 == b.1 && split(a.1).0 == split(b.1).0
        };
        for run in pending.chunk_by(next_to) {
            let Some((xid, position)) = run.first() else { continue };
            let (chunk, first) = split(*position);
            let act = Act::Enqueue { chunk, first, count: run.len() as u16 };
            self.restore_doubt(*xid, act)?;
        }
        Ok(())
    }

    fn restore_doubt(&self, xid: u32, act: Act) -> Result<()> {
        let doubt = Doubt { db: self.db, xid, order: 0, act };
        super::with(|d| d.restore_doubt(doubt)).map_err(capacity)
    }

    fn restore_open(&self, evidence: &Evidence) -> Result<()> {
        // Nobody could extend or complete while the server was away.
        let earliest = xact::micros() + guc::heartbeat_staleness().as_micros() as i64;
        let mut claims: Vec<Option<u32>> = vec![None; evidence.claims.len()];
        let mut releases = Releases::new();
        for item in &evidence.open {
            let Some(header) = evidence.claims.get(item.claim) else { continue };
            let name = self.name(header.lane_id)?;
            let known = claims.get(item.claim).copied().flatten();
            let deadline =
                if item.deadline == i64::MAX { i64::MAX } else { item.deadline.max(earliest) };
            let period = Item::period(item.deadline, header.claimed_at);
            let mark = self.marks.committed.get(&item.receipt).copied();
            // Who writes about an attempt holds it, as if to close it.
            let open_mark = self.marks.open.get(&item.receipt).copied();
            let writer = open_mark.map(|(xid, _)| xid);
            let closer = item.closing.map(|(xid, ..)| xid).or(writer).map(xact::top_of);
            let claimer = header.xid.map(xact::top_of);
            let runtime = match header.runtime {
                _ if header.id < self.first_receipt => Some(ELSEWHERE),
                runtime => runtime,
            };
            let restored = super::with(|d| {
                let claim = match known {
                    Some(claim) => claim,
                    None => {
                        let claim = d.restore_claim(
                            self.db,
                            &name,
                            (self.segment, header.id, header.count),
                            runtime,
                            header.claimed_at,
                            claimer,
                        )?;
                        if let Some(xid) = header.xid {
                            let act = Act::Claim { claim, first: header.id };
                            d.restore_doubt(Doubt { db: self.db, xid, order: 0, act })?;
                        }
                        claim
                    }
                };
                let at = d.restore_item(
                    claim,
                    (item.receipt, item.position),
                    item.attempt - 1,
                    (deadline, period),
                    closer,
                )?;
                Ok::<_, Full>((claim, at))
            });
            let (claim, at) = restored.map_err(capacity)?;
            if let Some(slot) = claims.get_mut(item.claim) {
                *slot = Some(claim);
            }
            if let Some(mark) = mark {
                super::with(|d| d.restore_mark(self.db, item.receipt, mark, xact::micros()));
            }
            if let Some((xid, mark)) = open_mark {
                let (receipt, end) = (item.receipt, End::Kept(mark));
                self.restore_doubt(xid, Act::Close { item: at, receipt, end })?;
            }
            if let Some(closing) = item.closing {
                self.restore_closing(closing, (at, item), &name, &mut releases)?;
            }
        }
        Ok(())
    }

    /// An open transaction closes the item: if it commits, the item ends like this.
    fn restore_closing(
        &self,
        (xid, outcome, due): (u32, Outcome, Option<i64>),
        (at, item): (u32, &evidence::OpenItem),
        name: &LaneName<'_>,
        releases: &mut Releases,
    ) -> Result<()> {
        let end = match outcome {
            Outcome::Completed | Outcome::Kept => End::Completed,
            Outcome::Failed | Outcome::DeadLettered => End::Failed,
            Outcome::Cancelled => End::Cancelled,
            Outcome::Moved => End::Moved,
            Outcome::Retryable | Outcome::Released | Outcome::Snoozed => {
                let used = item.attempt - i16::from(!outcome.counts_attempt());
                let snoozed = outcome == Outcome::Snoozed;
                let (chunk, offset) = split(item.position);
                let due = due.unwrap_or(0);
                let key = (xid, chunk, used, snoozed, due);
                let release = match releases.get(&key) {
                    Some(release) => *release,
                    None => {
                        let release = super::with(|d| {
                            let place = (chunk, &Bits::default());
                            let release = d.restore_pending_release(
                                self.db, name, place, used, snoozed, due,
                            )?;
                            let act = Act::Release { release };
                            d.restore_doubt(Doubt { db: self.db, xid, order: 0, act })?;
                            Ok::<_, Full>(release)
                        });
                        *releases.entry(key).or_insert(release.map_err(capacity)?)
                    }
                };
                super::with(|d| d.add_to_release(release, offset));
                End::Released(release)
            }
        };
        self.restore_doubt(xid, Act::Close { item: at, receipt: item.receipt, end })
    }

    /// Waiting jobs that open transactions dispose of.
    fn restore_withdrawn(&self, evidence: &Evidence) -> Result<()> {
        for (xid, position, outcome) in &evidence.withdrawn {
            let holder = xact::top_of(*xid);
            let held = super::with(|d| d.restore_withdrawn(self.db, *position, holder));
            let Some(release) = held.map_err(capacity)? else { continue };
            let cancelled = *outcome == Outcome::Cancelled;
            let act = Act::Withdraw { release, position: *position, cancelled };
            self.restore_doubt(*xid, act)?;
        }
        Ok(())
    }

    fn restore_released(&self, evidence: &Evidence) -> Result<()> {
        // Those of one chunk with the same attempts and time were released together.
        let mut groups: HashMap<(i64, i16, i64, bool), Bits> = HashMap::new();
        for (position, job) in &evidence.released {
            let (chunk, offset) = split(*position);
            let key = (chunk, job.attempts, job.due, job.snoozed);
            groups.entry(key).or_default().insert(offset);
        }
        let mut groups: Vec<_> = groups.into_iter().collect();
        groups.sort_unstable_by_key(|((chunk, _, due, _), _)| (*due, *chunk));
        let now = xact::micros();
        for ((chunk, attempts, due, snoozed), bits) in groups {
            let Some(owner) = evidence.chunks.get(&chunk) else { continue };
            let name = self.name(owner.lane_id)?;
            super::with(|d| {
                d.restore_release(self.db, &name, (chunk, &bits), attempts, snoozed, due, now)
            })
            .map_err(capacity)?;
        }
        Ok(())
    }
}
