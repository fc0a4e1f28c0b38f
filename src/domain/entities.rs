//! What the dispatcher keeps in shared memory. Plain data: every entity is valid
//! as all zeros, is named by its index in a table, and is changed only by the
//! operations in `dispatcher`.

use super::backoff::Backoff;
use super::bits::{Bits, CHUNK_SIZE};
use super::name::MAX_BYTES;
use super::rate::Rate;
use super::rescue::Passes;
use super::table::{Entry, NIL, Table, mix};
use super::wheel::{Timer, Timers, Wheel};

/// Index of a database in the dispatcher.
pub type Db = u16;

pub const YOUNG_SEGMENTS: u8 = 12;
pub const SEGMENTS: usize = 16;

/// The attempts used before an attempt, where only the job's body knows.
pub const AS_BODY: i16 = -1;

#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Phase {
    /// The slot is free.
    #[default]
    Absent,
    /// Producing works; claims and closes wait until memory equals the tables.
    Replaying,
    Open,
    /// Memory may be wrong; a replay is due.
    Suspect,
}

#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SegmentState {
    #[default]
    Free,
    Current,
    Sealed,
}

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Segment {
    /// Counts the truncations.
    pub generation: i64,
    pub state: SegmentState,
    /// When it became current (or was sealed).
    pub since: i64,
    /// Acts of open transactions that write to it.
    pub in_flight: u32,
    /// Grows with every act, so that "nothing happened meanwhile" can be seen.
    pub changes: u64,
    /// Committed jobs that have no final disposition.
    pub live: u64,
    /// Committed jobs since it became current.
    pub bodies: u64,
    /// When the last of its jobs was closed for good.
    pub last_end: i64,
    /// Its row has the directory of its chunks.
    pub listed: bool,
    /// Its row says that no undisposed job is left.
    pub disposed: bool,
    /// How often ends of its jobs went from memory to the totals of queues.
    pub counted: u32,
    /// What `changes` was before the last time.
    pub counted_at: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Database {
    pub oid: u32,
    pub extension: u32,
    pub phase: Phase,
    /// Counts the times memory was rebuilt; acts of an earlier one are settled by their xid.
    pub generation: u64,
    /// The generation with which the slot got this database: older acts are another's.
    pub attached: u64,
    pub changes: u64,
    /// Grows when ends go from memory to the totals of queues.
    pub counts: u64,
    /// Chunk numbers that may still be handed out: next..end, in blocks from a sequence.
    pub next_chunk: i64,
    pub end_chunk: i64,
    /// Replay restores chunks below; producers of this start use those above.
    pub floor: i64,
    /// Receipts that may still be handed out.
    pub next_receipt: i64,
    pub end_receipt: i64,
    /// Job ids that are not positions (of deferred jobs).
    pub next_id: i64,
    pub end_id: i64,
    pub current: u8,
    pub segments: [Segment; SEGMENTS],
    pub claim_wheel: Wheel,
    pub release_wheel: Wheel,
    pub runtime_wheel: Wheel,
    /// Of parked attempts.
    pub callback_wheel: Wheel,
    /// The earliest `run_at` among deferred jobs, as far as known; MAX: none.
    pub next_deferred: i64,
    /// No deferred job has an earlier `run_at`, but for what `deferred_noted` says: behind a
    /// pinned horizon the index begins with entries of jobs long gone.
    pub deferred_floor: i64,
    /// The earliest `run_at` of jobs that were deferred since the last promotion began.
    pub deferred_noted: i64,
    /// A dead runtime has open attempts.
    pub orphans: bool,
    /// No runtime has ended since the worker wrote down which have.
    pub ends_noted: bool,
    /// It does not do so again before this.
    pub ends_rest: i64,
    /// A replay of this start has begun: the next one starts over.
    pub replayed: bool,
    /// Somebody wrote to a leaf by hand, or a lock guard was lost.
    pub replay_due: bool,
    /// Doubtful acts that a callback could not settle may be settled now.
    pub doubts_due: bool,
    /// Somebody found no room for a queue: the worker is to count ends.
    pub count_due: bool,
    /// Producers between their grant and their last row.
    pub writers: u32,
    /// Those of them that a rebuild found, and the generation in which they began: their
    /// rows are waited for, since replay must not pass by them.
    pub stragglers: u32,
    pub straggling: u64,
    /// Where to look next for chunks to drop from memory.
    pub cool_hand: u32,
    /// Waiters for more queues than they can name.
    pub wide_waiters: u32,
    /// Some runtime may be `asked`.
    pub owners_asked: bool,
    /// The worker of this database: proc number + 1; 0: none.
    pub worker: u32,
    /// The worker sleeps until then unless woken; MIN: it is awake.
    pub worker_sleeps_until: i64,
    /// The halt of pruning that the worker obeys, and when it looked last.
    pub halt_seen: Option<[u8; 16]>,
    pub halt_seen_at: i64,
    /// When it began to obey it, and how much space the segments took then.
    pub halted_at: i64,
    pub halted_bytes: u64,
    /// By `rescue::Kind`.
    pub rescues: [Passes; 3],
    /// Times of priority ageing changed the choice of a lane.
    pub aged_claims: u64,
}

/// How the jobs of an ordering key follow each other.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Ordering {
    /// Their first attempts begin in the order of their lane.
    #[default]
    Lane,
    /// And one at a time.
    Serial,
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct QueueSettings {
    pub priority: u8,
    pub shards: u8,
    pub max_attempts: i16,
    /// Microseconds; 0: none.
    pub attempt_deadline: i64,
    /// Microseconds a level; 0: off.
    pub ageing: i64,
    pub backoff: Backoff,
    /// Jobs that fail for good become dead letters.
    pub dlq: bool,
    pub ordering: Ordering,
}

impl Default for QueueSettings {
    fn default() -> Self {
        Self {
            priority: 2,
            shards: 1,
            max_attempts: 25,
            attempt_deadline: 300_000_000,
            ageing: 60_000_000,
            backoff: Backoff::default(),
            dlq: false,
            ordering: Ordering::Lane,
        }
    }
}

/// Exact numbers of jobs by state; the last three are those ends that the totals in the
/// queue's row do not count yet.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct Counts {
    pub scheduled: i64,
    pub available: i64,
    pub running: i64,
    pub waiting_external: i64,
    pub retryable: i64,
    pub completed: i64,
    pub failed: i64,
    pub cancelled: i64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Queue {
    pub db: Db,
    name_len: u16,
    name: [u8; MAX_BYTES],
    pub settings: QueueSettings,
    pub paused: bool,
    /// Settings were read from the table.
    pub loaded: bool,
    /// It has a row in `queues`.
    pub stored: bool,
    /// Grows when settings change, and with a new queue in the slot.
    pub version: u32,
    pub counts: Counts,
    pub enqueued: Rate,
    pub completed: Rate,
    /// First of its lanes.
    pub lanes: u32,
    pub waiters: u32,
    /// Acts of open transactions that name it by its index: it stays until they end.
    pub pins: u32,
    /// The ordering keys of all its open attempts are known; never while it is not serial.
    pub sorted: bool,
    /// Jobs that are available but for their turn.
    pub blocked: u64,
}

fn hash_bytes(db: Db, bytes: &[u8]) -> u64 {
    // FNV-1a, then mixed: names are short and come from users who gain nothing by collisions
    // (a chain is walked by comparing whole names).
    let fnv = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64 ^ u64::from(db), |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    mix(fnv)
}

impl Queue {
    /// The name must have passed `name::check`.
    pub fn new(db: Db, name: &str, settings: QueueSettings) -> Self {
        let mut bytes = [0; MAX_BYTES];
        let len = name.len().min(MAX_BYTES);
        bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
        Self {
            db,
            name_len: len as u16,
            name: bytes,
            settings,
            paused: false,
            loaded: false,
            stored: false,
            version: 0,
            counts: Counts::default(),
            enqueued: Rate::default(),
            completed: Rate::default(),
            lanes: NIL,
            waiters: 0,
            pins: 0,
            sorted: false,
            blocked: 0,
        }
    }

    pub fn name(&self) -> &str {
        core::str::from_utf8(&self.name[..usize::from(self.name_len)]).unwrap_or("")
    }

    /// The name, to be read after the lock is gone: under it nothing is allocated.
    pub fn copy_name(&self) -> QueueName {
        QueueName { len: self.name_len, bytes: self.name }
    }

    pub fn key(db: Db, name: &str) -> u64 {
        hash_bytes(db, name.as_bytes())
    }
}

#[derive(Clone, Copy)]
pub struct QueueName {
    len: u16,
    bytes: [u8; MAX_BYTES],
}

impl QueueName {
    pub fn as_str(&self) -> &str {
        core::str::from_utf8(&self.bytes[..usize::from(self.len)]).unwrap_or("")
    }
}

impl Entry for Queue {
    fn hash(&self) -> u64 {
        Self::key(self.db, self.name())
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Lane {
    pub db: Db,
    pub priority: u8,
    pub shard: u8,
    /// A committed row in `queue_lanes` names it.
    pub durable: bool,
    pub queue: u32,
    pub id: i64,
    /// The next lane of its queue.
    pub next: u32,
    /// Where single jobs are put.
    pub open_chunk: u32,
    /// Chunks with ready jobs, by number.
    pub head: u32,
    pub tail: u32,
    /// Where the last chunk was linked: the next one usually belongs beside it.
    pub hint: u32,
    /// Released jobs that are ready again.
    pub returned: u32,
    pub returned_tail: u32,
    /// All that can be claimed: in chunks, cold chunks and returned releases.
    pub ready: u64,
    /// Chunks in memory.
    pub chunks: u32,
    /// Chunks that are not, by number, in these pages.
    pub cold: u32,
    pub cold_head: u32,
    pub cold_tail: u32,
    /// The highest chunk number it ever had.
    pub newest: i64,
}

impl Lane {
    pub fn key(queue: u32, priority: u8, shard: u8) -> u64 {
        mix(u64::from(queue) << 16 | u64::from(priority) << 8 | u64::from(shard))
    }
}

impl Entry for Lane {
    fn hash(&self) -> u64 {
        Self::key(self.queue, self.priority, self.shard)
    }
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Chunk {
    pub db: Db,
    pub segment: u8,
    pub linked: bool,
    /// A job was taken out of it once, so its rows do not say which are ready.
    pub touched: bool,
    pub lane: u32,
    pub number: i64,
    /// When the oldest of the jobs now waiting in it was enqueued, at the earliest.
    pub born: i64,
    /// Offsets handed out.
    pub allocated: u16,
    /// Offsets of open transactions.
    pub in_flight: u16,
    /// Committed jobs without a final disposition.
    pub live: u16,
    pub ready: u16,
    pub prev: u32,
    pub next: u32,
    pub bits: Bits,
}

impl Chunk {
    pub fn empty(db: Db, segment: u8, (lane, number): (u32, i64), born: i64) -> Self {
        Self {
            db,
            segment,
            linked: false,
            touched: false,
            lane,
            number,
            born,
            allocated: 0,
            in_flight: 0,
            live: 0,
            ready: 0,
            prev: NIL,
            next: NIL,
            bits: Bits::default(),
        }
    }

    pub fn key(db: Db, number: i64) -> u64 {
        mix((number as u64) << 4 ^ u64::from(db))
    }

    pub fn is_full(&self) -> bool {
        usize::from(self.allocated) == CHUNK_SIZE
    }
}

impl Entry for Chunk {
    fn hash(&self) -> u64 {
        Self::key(self.db, self.number)
    }
}

/// The chunk and the offset in it of a position.
pub fn split(position: i64) -> (i64, u16) {
    (position >> 10, (position & (CHUNK_SIZE as i64 - 1)) as u16)
}

pub fn position(chunk: i64, offset: u16) -> i64 {
    chunk << 10 | i64::from(offset)
}

/// One claim row: the attempts that a call took from one lane and one segment.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    pub db: Db,
    pub segment: u8,
    pub committed: bool,
    pub lane: u32,
    /// The receipt of its first item.
    pub first: i64,
    pub count: u32,
    /// Items that are not closed for good.
    pub open: u32,
    /// The first of the open ones.
    pub items: u32,
    /// NIL: a plain lease.
    pub runtime: u32,
    /// The transaction that claims, until it has committed.
    pub xid: u32,
    pub claimed_at: i64,
    /// At the earliest deadline of its items.
    pub timer: Timer,
    /// Of its runtime's claims.
    pub prev: u32,
    pub next: u32,
}

impl Claim {
    pub fn key(db: Db, first: i64) -> u64 {
        mix(first as u64 ^ u64::from(db) << 48)
    }
}

impl Entry for Claim {
    fn hash(&self) -> u64 {
        Self::key(self.db, self.first)
    }
}

/// In whose care an open attempt is.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Care {
    /// As its claim says.
    #[default]
    Claimer,
    /// Nobody's: it waits for a callback.
    Parked,
    /// It was resumed after its owner had gone, and ends at its deadline.
    Lease,
}

/// What its row in `attempt_state` says of an open attempt.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Mark {
    /// It was asked to stop: any end but completion cancels its job.
    pub asked: bool,
    pub care: Care,
    /// When the callback of a parked one times out.
    pub until: i64,
}

impl Mark {
    pub fn is_parked(&self) -> bool {
        self.care == Care::Parked
    }
}

/// One claimed attempt.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Item {
    pub db: Db,
    /// An open transaction (`closer`) is closing it, or changes its mark.
    pub closing: bool,
    /// How many acts of that transaction do.
    pub holds: u32,
    /// No later entry of that transaction's log is about it; MAX: unknown.
    pub last: u32,
    /// Claims of this job that were rolled back in a row.
    pub rollbacks: u8,
    /// Its body says the attempts used before this one, whether they were read or not.
    pub as_body: bool,
    /// Its body has a unique key, or may have one: who closes it has to look.
    pub keyed: bool,
    /// It has a row in `attempt_state`, or may have one: who closes it has to look.
    pub noted: bool,
    pub mark: Mark,
    /// Attempts used before this one, or AS_BODY.
    pub prior: i16,
    pub closer: u32,
    pub claim: u32,
    pub receipt: i64,
    pub position: i64,
    /// Microseconds; MAX: none.
    pub deadline: i64,
    /// The deadline as it was claimed, from then on; MAX: none.
    pub period: i64,
    /// No rescue looks at it before: it failed alone.
    pub aside: i64,
    /// At the time-out of its callback, while it is parked.
    pub timer: Timer,
    /// Its ordering key is known, if it has one: `turn`.
    pub sorted: bool,
    /// The turn of its ordering key, which it has; NIL: none.
    pub turn: u32,
    /// The neighbours in its claim.
    pub prev: u32,
    pub next: u32,
}

impl Item {
    /// How long it may take, claimed at `from`.
    pub fn period(deadline: i64, from: i64) -> i64 {
        if deadline == i64::MAX { i64::MAX } else { deadline.saturating_sub(from) }
    }

    /// Whether somebody should have finished it by now.
    pub fn has_expired(&self, now: i64) -> bool {
        self.deadline <= now && !self.mark.is_parked()
    }

    pub fn key(db: Db, receipt: i64) -> u64 {
        mix(receipt as u64 ^ u64::from(db) << 48)
    }
}

impl Entry for Item {
    fn hash(&self) -> u64 {
        Self::key(self.db, self.receipt)
    }
}

#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum ReleaseState {
    /// Belongs to a transaction that has not committed.
    #[default]
    Pending,
    /// Waits for its time.
    Timed,
    /// Ready, in its lane.
    Returned,
    /// Withdrawn by an open transaction.
    Held,
    /// Ready but for its turn: its ordering key has another attempt open.
    Blocked,
}

/// Where a withdrawn job goes back to when its transaction rolls back.
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Home {
    #[default]
    Chunk,
    Timer,
    /// Among those that returned to the lane.
    Lane,
}

/// Jobs of one chunk that became ready again together: same due time, same attempts.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Release {
    pub db: Db,
    pub state: ReleaseState,
    /// Counts as scheduled (snoozed) rather than retryable while it waits.
    pub snoozed: bool,
    pub rollbacks: u8,
    /// Attempts used, or AS_BODY.
    pub prior: i16,
    pub lane: u32,
    pub chunk: i64,
    pub bits: Bits,
    pub timer: Timer,
    /// When it became ready, for ageing.
    pub born: i64,
    /// It is popped before chunks with higher numbers; negative: before everything.
    pub after: i64,
    /// Of a held one: where its job was, and the transaction that withdrew it.
    pub home: Home,
    pub holder: u32,
    /// The next in its lane, or of those that wait for the same turn.
    pub next: u32,
    /// The turn of the ordering key of its jobs: the one a blocked one waits for, or that the
    /// first job of a returned one has. NIL: none, or unknown.
    pub turn: u32,
}

impl Release {
    /// Of a transaction that has not committed; its bits follow.
    pub fn pending(db: Db, (lane, chunk): (u32, i64), prior: i16, snoozed: bool, due: i64) -> Self {
        Self {
            db,
            state: ReleaseState::Pending,
            snoozed,
            rollbacks: 0,
            prior,
            lane,
            chunk,
            bits: Bits::default(),
            timer: Timer::stopped(due),
            born: due,
            after: 0,
            home: Home::Chunk,
            holder: 0,
            next: NIL,
            turn: NIL,
        }
    }
}

impl Entry for Release {
    fn hash(&self) -> u64 {
        // Never looked up by key: only walked and indexed.
        mix(self.chunk as u64)
    }
}

/// An ordering key of a serial queue that has an open attempt, or a job whose turn it is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Turn {
    pub db: Db,
    pub queue: u32,
    /// `ordering::hash` of it. Keys with the same one take turns too, which does no harm.
    pub hash: u64,
    /// Open attempts: one, or more that began before the queue was serial.
    pub open: u32,
    /// The returned release whose first job comes next; NIL: none.
    pub next: u32,
    /// Releases that wait, by priority less one.
    pub first: [u32; 4],
    pub last: [u32; 4],
}

impl Turn {
    pub fn new(db: Db, queue: u32, hash: u64) -> Self {
        Self { db, queue, hash, open: 0, next: NIL, first: [NIL; 4], last: [NIL; 4] }
    }

    pub fn key(queue: u32, hash: u64) -> u64 {
        mix(hash ^ u64::from(queue) << 32)
    }
}

impl Entry for Turn {
    fn hash(&self) -> u64 {
        Self::key(self.queue, self.hash)
    }
}

#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Liveness {
    #[default]
    Session,
    Heartbeat,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Runtime {
    pub db: Db,
    pub liveness: Liveness,
    pub dead: bool,
    pub id: [u8; 16],
    /// Of the backend that registered it, which a session runtime is bound to: proc number + 1.
    pub proc: u32,
    pub pid: i32,
    /// Microseconds, for heartbeats.
    pub timeout: i64,
    pub timer: Timer,
    pub last_seen: i64,
    /// Its claims with open items.
    pub claims: u32,
    pub open: u32,
    /// An attempt of it was asked to stop while no wait was there to be told.
    pub asked: bool,
}

impl Runtime {
    pub fn key(db: Db, id: &[u8; 16]) -> u64 {
        hash_bytes(db, id)
    }
}

impl Entry for Runtime {
    fn hash(&self) -> u64 {
        Self::key(self.db, &self.id)
    }
}

pub const WAITED_QUEUES: usize = 16;

/// A backend that waits for jobs; its index is its proc number.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Waiter {
    pub waiting: bool,
    pub woken: bool,
    /// An attempt of its runtimes was asked to stop.
    pub asked: bool,
    pub db: Db,
    pub pid: i32,
    /// Whom it waits for, besides the runtimes that its backend has registered; zeros: nobody.
    pub runtime: [u8; 16],
    /// More than `WAITED_QUEUES`: it waits for any queue of its database.
    pub count: u16,
    pub queues: [u32; WAITED_QUEUES],
    /// Of all waiters, in the order of their arrival.
    pub prev: u32,
    pub next: u32,
}

impl Waiter {
    /// Whether the waiter at `proc` works for the runtime.
    pub fn is_of(&self, proc: u32, runtime: &Runtime) -> bool {
        let registered = runtime.proc == proc + 1 && runtime.pid == self.pid;
        registered || runtime.id == self.runtime
    }

    pub fn is_wide(&self) -> bool {
        usize::from(self.count) > WAITED_QUEUES
    }

    /// The queues it names; none if it waits for any.
    pub fn named(&self) -> &[u32] {
        if self.is_wide() { &[] } else { &self.queues[..usize::from(self.count)] }
    }
}

/// An act of a transaction whose end its own backend does not report: it is
/// prepared, or it was open while memory was rebuilt.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Doubt {
    pub db: Db,
    pub xid: u32,
    /// Acts of a transaction are settled in this order: 0, 1, and so on.
    pub order: u32,
    pub act: super::undo::Act,
}

impl Doubt {
    pub fn key(xid: u32, order: u32) -> u64 {
        mix(u64::from(xid) << 32 | u64::from(order))
    }
}

impl Entry for Doubt {
    fn hash(&self) -> u64 {
        Self::key(self.xid, self.order)
    }
}

impl Timers for Table<'_, Claim> {
    fn timer(&mut self, entry: u32) -> &mut Timer {
        &mut self[entry].timer
    }
}

impl Timers for Table<'_, Item> {
    fn timer(&mut self, entry: u32) -> &mut Timer {
        &mut self[entry].timer
    }
}

impl Timers for Table<'_, Release> {
    fn timer(&mut self, entry: u32) -> &mut Timer {
        &mut self[entry].timer
    }
}

impl Timers for Table<'_, Runtime> {
    fn timer(&mut self, entry: u32) -> &mut Timer {
        &mut self[entry].timer
    }
}
