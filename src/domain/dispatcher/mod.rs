//! The operations on the dispatcher's memory. Each runs under the dispatcher lock,
//! is short, allocates nothing and cannot fail half-way: capacities are checked
//! before anything is written.
//!
//! `enqueue`, `claim` and `close` begin acts; `settle` ends them when their
//! transaction does; `replay` fills memory from the tables.

mod claim;
mod close;
mod cold;
mod doubt;
mod enqueue;
mod ordering;
mod park;
mod release;
mod replay;
mod runtime;
mod settle;
mod wait;
mod withdraw;

pub use claim::{Claimed, Owner, Popped, Request};
pub use close::{Take, Taken, Taker};
pub use cold::{Cold, Loaded};
pub use enqueue::{Grant, Granted};
pub use ordering::{Head, Unsorted};
pub use replay::{LaneName, Restored};
pub use settle::OPEN_ASIDE;
pub use wait::Wakes;
pub use withdraw::{Withdraw, Withdrawn};

use super::entities::*;
use super::page::Page;
use super::table::{NIL, Table};

/// Which capacity is used up, by its setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Full {
    Databases,
    Lanes,
    Chunks,
    OpenClaims,
    Runtimes,
    Timers,
}

impl Full {
    pub fn setting(self) -> &'static str {
        match self {
            Self::Databases => "awa.max_databases",
            Self::Lanes => "awa.max_lanes",
            Self::Chunks => "awa.max_chunks",
            Self::OpenClaims => "awa.max_open_claims",
            Self::Runtimes => "awa.max_runtimes",
            Self::Timers => "awa.max_timers",
        }
    }
}

pub struct Dispatcher<'a> {
    pub databases: &'a mut [Database],
    pub queues: Table<'a, Queue>,
    pub lanes: Table<'a, Lane>,
    pub chunks: Table<'a, Chunk>,
    /// Of cold chunks.
    pub pages: Table<'a, Page>,
    pub claims: Table<'a, Claim>,
    pub items: Table<'a, Item>,
    pub releases: Table<'a, Release>,
    /// As many as open attempts and releases together: it cannot run full.
    pub turns: Table<'a, Turn>,
    pub runtimes: Table<'a, Runtime>,
    pub doubts: Table<'a, Doubt>,
    /// Indexed by proc number.
    pub waiters: &'a mut [Waiter],
    /// First and last of the waiting, in the order of their arrival.
    pub waiting: &'a mut [u32; 2],
    /// Whom to wake once the lock is released.
    pub wakes: &'a mut Wakes,
}

impl Dispatcher<'_> {
    /// Brings memory of any content into the state of a fresh start.
    pub fn format(&mut self) {
        for database in self.databases.iter_mut() {
            database.phase = Phase::Absent;
            database.generation = 0;
        }
        self.queues.format();
        self.lanes.format();
        self.chunks.format();
        self.pages.format();
        self.claims.format();
        self.items.format();
        self.releases.format();
        self.turns.format();
        self.runtimes.format();
        self.doubts.format();
        for waiter in self.waiters.iter_mut() {
            waiter.waiting = false;
        }
        *self.waiting = [NIL; 2];
    }

    pub fn database(&self, oid: u32, extension: u32) -> Option<Db> {
        self.databases
            .iter()
            .position(|d| d.phase != Phase::Absent && d.oid == oid && d.extension == extension)
            .map(|at| at as Db)
    }

    /// Begins to serve a database: producing works from here on.
    ///
    /// * `block` - the first chunk number of a block nobody used, and its length
    /// * `segments` - as in the table
    pub fn attach(
        &mut self,
        oid: u32,
        extension: u32,
        block: (i64, i64),
        segments: &[Segment; SEGMENTS],
        current: u8,
        now: i64,
    ) -> Result<Db, Full> {
        if let Some(db) = self.database(oid, extension) {
            return Ok(db);
        }
        let at =
            self.databases.iter().position(|d| d.phase == Phase::Absent).ok_or(Full::Databases)?;
        // Nothing of the database that had the slot before stays but the count of its lives.
        let generation = self.databases[at].generation + 1;
        let database = &mut self.databases[at];
        *database = Database {
            oid,
            extension,
            phase: Phase::Replaying,
            generation,
            attached: generation,
            next_chunk: block.0,
            end_chunk: block.0 + block.1,
            floor: block.0,
            current,
            segments: *segments,
            next_deferred: i64::MAX,
            deferred_floor: i64::MIN,
            deferred_noted: i64::MAX,
            worker_sleeps_until: i64::MIN,
            ..Database::default()
        };
        database.claim_wheel.format(now);
        database.release_wheel.format(now);
        database.runtime_wheel.format(now);
        database.callback_wheel.format(now);
        Ok(at as Db)
    }

    /// Forgets a database that is gone.
    pub fn detach(&mut self, db: Db) {
        self.clear(db);
        self.doubts.remove_where(|d| d.db == db);
        self.dismiss_waiters(db);
        self.queues.remove_where(|q| q.db == db);
        self.runtimes.remove_where(|r| r.db == db);
        let database = &mut self.databases[usize::from(db)];
        database.phase = Phase::Absent;
        database.generation += 1;
    }

    pub fn base(&mut self, db: Db) -> &mut Database {
        &mut self.databases[usize::from(db)]
    }

    fn changed(&mut self, db: Db, segment: u8) {
        let database = self.base(db);
        database.changes += 1;
        database.segments[usize::from(segment)].changes += 1;
    }

    pub fn queue(&self, db: Db, name: &str) -> Option<u32> {
        self.queues.find(Queue::key(db, name), |q| q.db == db && q.name() == name)
    }

    /// The queue in memory, added if it is not there yet.
    pub fn ensure_queue(&mut self, db: Db, name: &str) -> Result<u32, Full> {
        if let Some(queue) = self.queue(db, name) {
            return Ok(queue);
        }
        if self.queues.free() == 0 {
            // A queue goes only after its lanes.
            self.evict_lanes(db);
            self.evict_queues(db);
        }
        self.queues.insert(Queue::new(db, name, QueueSettings::default())).ok_or(Full::Lanes)
    }

    /// Frees the queues that nothing in memory refers to and that have no job, nor an end
    /// since the last disposed segment: the tables say all about them.
    fn evict_queues(&mut self, db: Db) {
        let mut from = 0;
        while let Some(at) = self.queues.next_used(from) {
            from = at + 1;
            let queue = &self.queues[at];
            let idle = queue.lanes == NIL && queue.waiters == 0 && queue.pins == 0;
            if queue.db == db && idle && queue.counts == Counts::default() {
                self.queues.remove(at);
            }
        }
    }

    pub fn lane(&self, queue: u32, priority: u8, shard: u8) -> Option<u32> {
        self.lanes.find(Lane::key(queue, priority, shard), |l| {
            l.queue == queue && l.priority == priority && l.shard == shard
        })
    }

    pub fn add_lane(
        &mut self,
        db: Db,
        queue: u32,
        priority: u8,
        shard: u8,
        id: i64,
        durable: bool,
    ) -> Result<u32, Full> {
        if let Some(lane) = self.lane(queue, priority, shard) {
            let entry = &mut self.lanes[lane];
            entry.durable |= durable && entry.id == id;
            return Ok(lane);
        }
        if self.lanes.free() == 0 {
            self.evict_lanes(db);
        }
        let lane = Lane {
            db,
            priority,
            shard,
            durable,
            queue,
            id,
            next: self.queues[queue].lanes,
            open_chunk: NIL,
            head: NIL,
            tail: NIL,
            hint: NIL,
            returned: NIL,
            returned_tail: NIL,
            ready: 0,
            chunks: 0,
            cold: 0,
            cold_head: NIL,
            cold_tail: NIL,
            newest: -1,
        };
        let at = self.lanes.insert(lane).ok_or(Full::Lanes)?;
        self.queues[queue].lanes = at;
        Ok(at)
    }

    /// Frees the lanes without a job.
    fn evict_lanes(&mut self, db: Db) {
        let mut from = 0;
        while let Some(at) = self.lanes.next_used(from) {
            from = at + 1;
            if self.lanes[at].db != db {
                continue;
            }
            self.close_idle_chunk(at);
            let Lane { chunks, cold, returned, .. } = self.lanes[at];
            if chunks == 0 && cold == 0 && returned == NIL {
                self.unlink_lane(at);
                self.lanes.remove(at);
            }
        }
    }

    fn unlink_lane(&mut self, lane: u32) {
        let queue = self.lanes[lane].queue;
        let next = self.lanes[lane].next;
        let mut at = self.queues[queue].lanes;
        if at == lane {
            self.queues[queue].lanes = next;
            return;
        }
        while at != NIL {
            if self.lanes[at].next == lane {
                self.lanes[at].next = next;
                return;
            }
            at = self.lanes[at].next;
        }
    }

    pub fn chunk(&self, db: Db, number: i64) -> Option<u32> {
        self.chunks.find(Chunk::key(db, number), |c| c.number == number && c.db == db)
    }

    pub fn runtime(&self, db: Db, id: &[u8; 16]) -> Option<u32> {
        self.runtimes.find(Runtime::key(db, id), |r| r.db == db && r.id == *id)
    }

    pub fn item(&self, db: Db, receipt: i64) -> Option<u32> {
        self.items.find(Item::key(db, receipt), |i| i.receipt == receipt && i.db == db)
    }

    pub fn claim_by_first(&self, db: Db, first: i64) -> Option<u32> {
        self.claims.find(Claim::key(db, first), |c| c.first == first && c.db == db)
    }
}
