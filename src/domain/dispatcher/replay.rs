//! Filling memory from the tables.

use super::*;
use crate::domain::bits::{Bits, CHUNK_SIZE};
use crate::domain::undo::Act;

/// A lane as the tables name it.
#[derive(Clone, Copy, Debug)]
pub struct LaneName<'n> {
    pub queue: &'n str,
    pub priority: u8,
    pub shard: u8,
    pub id: i64,
    /// Its row is committed.
    pub durable: bool,
}

/// A chunk as the tables show it.
#[derive(Clone, Copy, Debug)]
pub struct Restored {
    pub number: i64,
    pub segment: u8,
    pub born: i64,
    /// Jobs that can be claimed and have the attempts their body says.
    pub ready: Bits,
    /// All committed jobs without a final disposition.
    pub live: u16,
    /// Jobs of transactions whose end is not known.
    pub in_flight: u16,
    /// No claim and no closure ever named one of its jobs: all its bodies are ready.
    pub untouched: bool,
}

impl Dispatcher<'_> {
    /// Forgets everything about a database but who lives and who waits.
    pub(super) fn clear(&mut self, db: Db) {
        let base = usize::from(db);
        let mut from = 0;
        while let Some(at) = self.claims.next_used(from) {
            from = at + 1;
            if self.claims[at].db == db {
                self.databases[base].claim_wheel.stop(&mut self.claims, at);
            }
        }
        let mut from = 0;
        while let Some(at) = self.releases.next_used(from) {
            from = at + 1;
            if self.releases[at].db == db {
                self.databases[base].release_wheel.stop(&mut self.releases, at);
            }
        }
        let mut from = 0;
        while let Some(at) = self.items.next_used(from) {
            from = at + 1;
            if self.items[at].db == db {
                self.databases[base].callback_wheel.stop(&mut self.items, at);
            }
        }
        self.turns.remove_where(|t| t.db == db);
        self.items.remove_where(|i| i.db == db);
        self.claims.remove_where(|c| c.db == db);
        self.releases.remove_where(|r| r.db == db);
        self.chunks.remove_where(|c| c.db == db);
        self.pages.remove_where(|p| p.db == db);
        self.lanes.remove_where(|l| l.db == db);
        self.forget_rebuilt_doubts(db);
        let mut from = 0;
        while let Some(at) = self.queues.next_used(from) {
            from = at + 1;
            let queue = &mut self.queues[at];
            if queue.db == db {
                queue.lanes = NIL;
                queue.counts = Counts::default();
                queue.loaded = false;
                queue.sorted = false;
                queue.blocked = 0;
            }
        }
        let mut from = 0;
        while let Some(at) = self.runtimes.next_used(from) {
            from = at + 1;
            if self.runtimes[at].db == db {
                self.runtimes[at].claims = NIL;
                self.runtimes[at].open = 0;
                self.forget_dead_runtime(at);
            }
        }
    }

    /// Begins to rebuild the memory of a database that is served already. Acts of open
    /// transactions are settled by their xid from here on.
    pub fn begin_rebuild(
        &mut self,
        db: Db,
        block: (i64, i64),
        segments: &[Segment; SEGMENTS],
        current: u8,
    ) {
        self.clear(db);
        let database = self.base(db);
        database.phase = Phase::Replaying;
        database.straggling = database.generation;
        database.stragglers = core::mem::take(&mut database.writers);
        database.generation += 1;
        database.changes += 1;
        database.counts += 1;
        database.next_chunk = block.0;
        database.end_chunk = block.0 + block.1;
        database.floor = block.0;
        database.next_id = 0;
        database.end_id = 0;
        database.current = current;
        database.segments = *segments;
        database.next_deferred = i64::MAX;
        database.deferred_floor = i64::MIN;
        database.deferred_noted = i64::MAX;
        database.orphans = false;
        database.replay_due = false;
    }

    pub fn restore_lane(&mut self, db: Db, name: &LaneName<'_>) -> Result<u32, Full> {
        let queue = self.ensure_queue(db, name.queue)?;
        self.add_lane(db, queue, name.priority, name.shard, name.id, name.durable)
    }

    pub fn restore_chunk(
        &mut self,
        db: Db,
        name: &LaneName<'_>,
        chunk: &Restored,
    ) -> Result<(), Full> {
        if chunk.live == 0 && chunk.in_flight == 0 {
            // Nothing would ever remove it.
            return Ok(());
        }
        let lane = self.restore_lane(db, name)?;
        let ready = chunk.ready.count();
        let entry = Chunk {
            touched: !chunk.untouched,
            allocated: CHUNK_SIZE as u16,
            in_flight: chunk.in_flight,
            live: chunk.live,
            ready,
            bits: chunk.ready,
            ..Chunk::empty(db, chunk.segment, (lane, chunk.number), chunk.born)
        };
        if !self.restore_cold(&entry) {
            // What fitted before fits again, so replay may use what is kept for loads.
            if !self.make_room(db, true) {
                return Err(Full::Chunks);
            }
            let at = self.chunks.insert(entry).ok_or(Full::Chunks)?;
            self.lanes[lane].chunks += 1;
            if ready > 0 {
                self.link_chunk(at);
            }
        }
        let lane_entry = &mut self.lanes[lane];
        lane_entry.ready += u64::from(ready);
        lane_entry.newest = lane_entry.newest.max(chunk.number);
        let queue = lane_entry.queue;
        self.queues[queue].counts.available += i64::from(ready);
        self.base(db).segments[usize::from(chunk.segment)].live += u64::from(chunk.live);
        Ok(())
    }

    /// How many producers began before the rebuild and have not written all their rows.
    pub fn stragglers(&mut self, db: Db) -> u32 {
        self.base(db).stragglers
    }

    /// Replay waits no longer: whoever is late asks for another one.
    pub fn leave_stragglers(&mut self, db: Db) {
        self.base(db).stragglers = 0;
    }

    /// An open claim. Its lane has a chunk in memory: the job's. Items follow.
    ///
    /// * `xid` - the top transaction that claims, while its end is open
    pub fn restore_claim(
        &mut self,
        db: Db,
        name: &LaneName<'_>,
        (segment, first, count): (u8, i64, u32),
        runtime: Option<[u8; 16]>,
        claimed_at: i64,
        xid: Option<u32>,
    ) -> Result<u32, Full> {
        let lane = self.restore_lane(db, name)?;
        let owner = match runtime {
            None => NIL,
            Some(id) => match self.runtime(db, &id) {
                Some(at) => at,
                // Nobody knows it any more: it died with its session, or was buried.
                None => {
                    let dead = Runtime {
                        db,
                        liveness: Liveness::Session,
                        dead: true,
                        id,
                        proc: 0,
                        pid: 0,
                        timeout: 0,
                        timer: Default::default(),
                        last_seen: claimed_at,
                        claims: NIL,
                        open: 0,
                        asked: false,
                    };
                    self.runtimes.insert(dead).ok_or(Full::Runtimes)?
                }
            },
        };
        if owner != NIL && self.runtimes[owner].dead {
            self.base(db).orphans = true;
        }
        let claim = Claim {
            db,
            segment,
            committed: xid.is_none(),
            lane,
            first,
            count: 0,
            open: 0,
            items: NIL,
            runtime: owner,
            xid: xid.unwrap_or(0),
            claimed_at,
            timer: Default::default(),
            prev: NIL,
            next: NIL,
        };
        let at = self.add_claim(claim).ok_or(Full::OpenClaims)?;
        self.claims[at].count = count;
        Ok(at)
    }

    /// An open item of a restored claim.
    ///
    /// * `deadline` - now, and as it was claimed, from then on
    /// * `closer` - a top transaction whose end is not known and that closes it or changes
    ///   its mark; its doubts follow
    pub fn restore_item(
        &mut self,
        claim: u32,
        (receipt, position): (i64, i64),
        prior: i16,
        (deadline, period): (i64, i64),
        closer: Option<u32>,
    ) -> Result<u32, Full> {
        let db = self.claims[claim].db;
        let count = self.claims[claim].count;
        let item = Item {
            aside: 0,
            db,
            closing: closer.is_some(),
            holds: 0,
            last: u32::MAX,
            rollbacks: 0,
            as_body: prior == AS_BODY,
            // Bodies are not read: who closes it finds out.
            keyed: true,
            noted: true,
            mark: Mark::default(),
            prior,
            closer: closer.unwrap_or(0),
            claim,
            receipt,
            position,
            deadline,
            period,
            timer: Default::default(),
            sorted: false,
            turn: NIL,
            prev: NIL,
            next: NIL,
        };
        let at = self.add_item(claim, item).ok_or(Full::OpenClaims)?;
        // `add_item` counts the items of a new claim; the row said how many this one had.
        self.claims[claim].count = count;
        let queue = self.lanes[self.claims[claim].lane].queue;
        let counts = &mut self.queues[queue].counts;
        if self.claims[claim].committed {
            counts.running += 1;
        } else {
            counts.available += 1;
        }
        let timer = self.claims[claim].timer;
        if deadline < i64::MAX && (!timer.is_running() || deadline < timer.at) {
            self.schedule_claim(claim, deadline);
        }
        Ok(at)
    }

    /// Jobs that were released: timed, or ready with the attempts they had.
    pub fn restore_release(
        &mut self,
        db: Db,
        name: &LaneName<'_>,
        (chunk, bits): (i64, &Bits),
        prior: i16,
        snoozed: bool,
        due: i64,
        now: i64,
    ) -> Result<(), Full> {
        let at = self.restore_pending_release(db, name, (chunk, bits), prior, snoozed, due)?;
        self.start_release(at, now);
        Ok(())
    }

    /// Jobs that an open transaction releases: to be named by its doubts, as `Act::Release`
    /// and `End::Released`.
    pub fn restore_pending_release(
        &mut self,
        db: Db,
        name: &LaneName<'_>,
        (chunk, bits): (i64, &Bits),
        prior: i16,
        snoozed: bool,
        due: i64,
    ) -> Result<u32, Full> {
        let lane = self.restore_lane(db, name)?;
        let release =
            Release { bits: *bits, ..Release::pending(db, (lane, chunk), prior, snoozed, due) };
        self.releases.insert(release).ok_or(Full::Timers)
    }

    /// Something an open (prepared, or foreign) transaction did; what it acts on was restored
    /// before. Acts of one transaction are settled in the order in which they come here.
    pub fn restore_doubt(&mut self, doubt: Doubt) -> Result<(), Full> {
        let Doubt { db, xid, act, .. } = doubt;
        let order = self.doubts_of(xid);
        self.doubts.insert(Doubt { order, ..doubt }).ok_or(Full::OpenClaims)?;
        self.pin(db, act);
        let segment = match act {
            Act::Enqueue { chunk, .. } => self.chunk(db, chunk).map(|at| self.chunks[at].segment),
            Act::Withdraw { position, .. } => {
                self.chunk(db, split(position).0).map(|at| self.chunks[at].segment)
            }
            Act::Claim { claim, .. } => Some(self.claims[claim].segment),
            Act::Close { receipt, .. } => self.item(db, receipt).map(|at| {
                self.items[at].holds += 1;
                self.claims[self.items[at].claim].segment
            }),
            _ => None,
        };
        if let Some(segment) = segment {
            self.base(db).segments[usize::from(segment)].in_flight += 1;
            self.changed(db, segment);
        }
        Ok(())
    }

    /// Deferred jobs of a queue, and ends that its totals do not count yet.
    pub fn restore_counts(&mut self, db: Db, queue: &str, add: &Counts) -> Result<(), Full> {
        let at = self.ensure_queue(db, queue)?;
        let counts = &mut self.queues[at].counts;
        counts.scheduled += add.scheduled;
        counts.retryable += add.retryable;
        counts.completed += add.completed;
        counts.failed += add.failed;
        counts.cancelled += add.cancelled;
        Ok(())
    }

    /// Whether the receipts of this epoch go to their end.
    pub fn wants_receipts(&mut self, db: Db) -> bool {
        let database = self.base(db);
        database.end_receipt - database.next_receipt < crate::domain::receipt::PER_EPOCH / 2
    }

    /// A new epoch was committed: its receipts are later than all before.
    pub fn renew_receipts(&mut self, db: Db, receipts: (i64, i64)) {
        let database = self.base(db);
        if receipts.0 >= database.next_receipt {
            database.next_receipt = receipts.0;
            database.end_receipt = receipts.1;
        }
    }

    /// The rows of queues have changed: what memory knows of them is read again.
    pub fn distrust_settings(&mut self, db: Db) {
        let mut from = 0;
        while let Some(at) = self.queues.next_used(from) {
            from = at + 1;
            let queue = &mut self.queues[at];
            if queue.db == db {
                queue.loaded = false;
                queue.version = queue.version.wrapping_add(1);
            }
        }
    }

    /// Memory equals the tables: claims and closes may go on.
    pub fn finish_replay(&mut self, db: Db, receipts: (i64, i64), next_deferred: i64) {
        let database = self.base(db);
        database.next_receipt = receipts.0;
        database.end_receipt = receipts.1;
        database.next_deferred = database.next_deferred.min(next_deferred);
        database.phase = Phase::Open;
        // Rows of runtimes may have come with those that were replayed.
        database.ends_noted = false;
        database.changes += 1;
        let mut from = 0;
        while let Some(at) = self.claims.next_used(from) {
            from = at + 1;
            if self.claims[at].db == db {
                self.let_go_of(at);
            }
        }
        let mut from = 0;
        while let Some(at) = self.queues.next_used(from) {
            from = at + 1;
            if self.queues[at].db == db {
                let jobs = self.claimable(at);
                self.wake(at, jobs);
            }
        }
    }
}
