//! The end of a transaction: its acts are played forward or undone. Everything here is
//! idempotent, looks entries up by what they are rather than where they were, and cannot fail.

use super::*;
use crate::domain::undo::{Act, End, Entry, UndoLog};

/// How long no rescue looks at an item that one left open, microseconds.
pub const OPEN_ASIDE: i64 = 1_000_000;

impl Dispatcher<'_> {
    /// Writes down an act that no operation here begins by itself. The queue it names stays
    /// in memory until the act is settled, so that its index cannot come to mean another.
    /// The log needs room for one entry.
    pub fn note(&mut self, db: Db, subxact: u32, act: Act, log: &mut UndoLog) -> usize {
        let generation = self.base(db).generation;
        self.note_since(db, generation, subxact, act, log)
    }

    /// As `note`, of an act whose rows were begun in this generation.
    pub fn note_since(
        &mut self,
        db: Db,
        generation: u64,
        subxact: u32,
        act: Act,
        log: &mut UndoLog,
    ) -> usize {
        self.pin(db, act);
        log.push(Entry { db, generation, subxact, act })
    }

    fn pinned(&self, db: Db, act: Act) -> Option<u32> {
        match act {
            Act::Defer { queue, .. }
            | Act::Count { queue, .. }
            | Act::Pause { queue, .. }
            | Act::Configure { queue } => {
                Some(queue).filter(|q| self.queues.get(*q).is_some_and(|q| q.db == db))
            }
            _ => None,
        }
    }

    pub(super) fn pin(&mut self, db: Db, act: Act) {
        if let Some(queue) = self.pinned(db, act) {
            self.queues[queue].pins += 1;
        }
    }

    pub(super) fn unpin(&mut self, db: Db, act: Act) {
        if let Some(queue) = self.pinned(db, act) {
            let pins = &mut self.queues[queue].pins;
            *pins = pins.saturating_sub(1);
        }
    }

    /// Whether memory was rebuilt since the act and holds it as a doubt, to be settled by
    /// xid. While a replay runs its doubts are half of the story: they are settled after it.
    pub fn outlived(&mut self, entry: &Entry) -> bool {
        let database = self.base(entry.db);
        database.generation != entry.generation
            && database.phase == Phase::Open
            && entry.act.is_rebuilt()
    }

    /// Plays an act of a committed transaction forward.
    pub fn settle(&mut self, entry: &Entry, now: i64) {
        let Entry { db, generation, act, .. } = *entry;
        let Database { phase, attached, .. } = *self.base(db);
        if phase == Phase::Absent || generation < attached {
            return;
        }
        if self.base(db).generation == generation || !act.is_rebuilt() {
            self.commit_act(db, act, now);
            return;
        }
        self.unpin(db, act);
        self.keep_again(db, act, now);
        self.leave_to_doubts(db);
    }

    /// Of the rows that one transaction wrote about an attempt, replay has met the last alone.
    /// It may have been rolled back to an earlier one since.
    fn keep_again(&mut self, db: Db, act: Act, now: i64) {
        let Act::Close { receipt, end: End::Kept(mark), .. } = act else { return };
        if self.base(db).phase == Phase::Open
            && let Some(at) = self.item(db, receipt)
        {
            self.set_mark(at, mark, now);
            self.let_go_of(self.items[at].claim);
        }
    }

    /// Takes back an act of a transaction or subtransaction that was rolled back.
    pub fn undo(&mut self, entry: &Entry, now: i64) {
        let Entry { db, generation, act, .. } = *entry;
        let Database { phase, attached, .. } = *self.base(db);
        if phase == Phase::Absent || generation < attached {
            return;
        }
        if self.base(db).generation == generation || !act.is_rebuilt() {
            self.abort_act(db, act, now);
        } else {
            self.unpin(db, act);
            self.leave_to_doubts(db);
        }
    }

    /// Memory was rebuilt meanwhile: replay found the rows of the act and left it in doubt,
    /// or finds them committed. `settle_doubts` ends the doubt, by the worker if it is not
    /// there yet. What a rebuild could have missed does not commit (`confirm`), or is
    /// written before replay reads (`begin_write`).
    fn leave_to_doubts(&mut self, db: Db) {
        self.base(db).doubts_due = true;
        self.wake_worker_for(db, i64::MIN);
    }

    pub(super) fn commit_act(&mut self, db: Db, act: Act, now: i64) {
        self.unpin(db, act);
        match act {
            Act::Enqueue { chunk, first, count } => {
                let Some(at) = self.chunk_in_flight(db, chunk, count) else { return };
                let chunk = &mut self.chunks[at];
                chunk.in_flight -= count;
                chunk.live += count;
                chunk.ready += count;
                chunk.bits.insert_range(first, count);
                let Chunk { lane, segment, .. } = *chunk;
                self.link_chunk(at);
                self.lanes[lane].ready += u64::from(count);
                let queue = self.lanes[lane].queue;
                self.queues[queue].counts.available += i64::from(count);
                self.queues[queue].enqueued.add(u32::from(count), now);
                let entry = &mut self.base(db).segments[usize::from(segment)];
                entry.live += u64::from(count);
                entry.bodies += u64::from(count);
                self.leave_segment(db, segment);
                self.wake(queue, u64::from(count));
            }
            Act::Lane { lane, id } => {
                if self.lanes.get(lane).is_some_and(|l| l.id == id && l.db == db) {
                    self.lanes[lane].durable = true;
                }
            }
            Act::Claim { claim, first } => self.commit_claim(db, claim, first),
            Act::Close { item, receipt, end } => self.commit_close(db, item, receipt, end, now),
            Act::Release { release } => {
                if self.pending_release(db, release) {
                    self.start_release(release, now);
                }
            }
            Act::Withdraw { release, position, cancelled } => {
                self.commit_withdrawal(db, release, position, cancelled, now);
            }
            Act::Defer { queue, retryable, count, due } => {
                if self.queues.get(queue).is_none_or(|q| q.db != db) {
                    return;
                }
                let counts = &mut self.queues[queue].counts;
                *(if retryable { &mut counts.retryable } else { &mut counts.scheduled }) +=
                    i64::from(count);
                self.base(db).changes += 1;
                if count > 0 {
                    let database = self.base(db);
                    database.deferred_noted = database.deferred_noted.min(due);
                    if due < database.next_deferred {
                        database.next_deferred = due;
                        self.wake_worker_for(db, due);
                    }
                }
            }
            Act::Count { queue, completed, failed, cancelled } => {
                if self.queues.get(queue).is_some_and(|q| q.db == db) {
                    let counts = &mut self.queues[queue].counts;
                    counts.completed -= completed;
                    counts.failed -= failed;
                    counts.cancelled -= cancelled;
                    self.base(db).changes += 1;
                }
            }
            Act::Pause { queue, paused } => {
                if self.queues.get(queue).is_none_or(|q| q.db != db) {
                    return;
                }
                self.queues[queue].paused = paused;
                self.queues[queue].version = self.queues[queue].version.wrapping_add(1);
                let jobs = self.claimable(queue);
                self.wake(queue, jobs);
            }
            Act::Configure { queue } => {
                if self.queues.get(queue).is_some_and(|q| q.db == db) {
                    self.queues[queue].loaded = false;
                    self.queues[queue].version = self.queues[queue].version.wrapping_add(1);
                    // Who looks now finds what the new settings let go.
                    self.wake(queue, self.queues[queue].blocked);
                }
            }
            Act::Deregister { runtime, id } => {
                // One that was declared dead meanwhile gets nothing back by leaving in order.
                let alive = |r: &Runtime| r.db == db && r.id == id && !r.dead;
                if self.runtimes.get(runtime).is_some_and(alive) {
                    self.retire_runtime(runtime);
                }
            }
            Act::Rotate { segment, since } => self.commit_rotation(db, segment, since),
            Act::List { segment, generation, disposed } => {
                let entry = &mut self.base(db).segments[usize::from(segment)];
                if entry.generation == generation && entry.state == SegmentState::Sealed {
                    entry.listed = true;
                    entry.disposed |= disposed;
                    self.base(db).changes += 1;
                }
            }
            Act::Counted { segment, times, generation, changes } => {
                let entry = &mut self.base(db).segments[usize::from(segment)];
                if entry.generation == generation {
                    entry.counted = times;
                    entry.counted_at = changes;
                }
                self.base(db).counts += 1;
            }
            Act::Promote { floor, generation } => {
                if self.base(db).generation == generation {
                    self.base(db).deferred_floor = floor;
                }
            }
            Act::Truncate { segment, generation } => {
                let entry = &mut self.base(db).segments[usize::from(segment)];
                *entry = Segment {
                    generation,
                    changes: entry.changes + 1,
                    in_flight: entry.in_flight,
                    since: now,
                    ..Default::default()
                };
                self.base(db).changes += 1;
            }
            Act::Foreign => {
                for segment in &mut self.base(db).segments {
                    segment.listed = false;
                    segment.disposed = false;
                }
                self.base(db).replay_due = true;
                self.wake_worker_for(db, i64::MIN);
            }
            Act::Register { .. } | Act::Nothing => {}
        }
    }

    pub(super) fn abort_act(&mut self, db: Db, act: Act, now: i64) {
        self.unpin(db, act);
        match act {
            Act::Enqueue { chunk, count, .. } => {
                let Some(at) = self.chunk_in_flight(db, chunk, count) else { return };
                self.chunks[at].in_flight -= count;
                let segment = self.chunks[at].segment;
                self.leave_segment(db, segment);
                self.settle_chunk(at);
            }
            Act::Claim { claim, first } => {
                if self.claims.get(claim).is_some_and(|c| c.db == db && c.first == first) {
                    let segment = self.claims[claim].segment;
                    self.give_back_claim(claim, now);
                    self.remove_claim(claim);
                    self.leave_segment(db, segment);
                }
            }
            Act::Close { item, receipt, end } => {
                let Some(Item { closing, position, .. }) =
                    self.items.get(item).copied().filter(|i| i.db == db && i.receipt == receipt)
                else {
                    return;
                };
                if !closing {
                    return;
                }
                // The release may be an outer subtransaction's, which goes on without this job.
                if let End::Released(release) = end {
                    let (chunk, offset) = split(position);
                    if self.pending_release(db, release) && self.releases[release].chunk == chunk {
                        self.releases[release].bits.remove(offset);
                    }
                }
                self.unhold(item);
            }
            Act::Release { release } => {
                if self.pending_release(db, release) {
                    self.releases.remove(release);
                }
            }
            Act::Withdraw { release, position, .. } => {
                self.abort_withdrawal(db, release, position);
            }
            Act::Register { runtime, id } => {
                if self.runtimes.get(runtime).is_some_and(|r| r.db == db && r.id == id) {
                    self.bury_runtime(runtime);
                }
            }
            Act::Configure { queue } => {
                // The transaction may have read its own row into memory.
                if self.queues.get(queue).is_some_and(|q| q.db == db) {
                    self.queues[queue].loaded = false;
                    self.queues[queue].version = self.queues[queue].version.wrapping_add(1);
                }
            }
            Act::Lane { .. }
            | Act::Defer { .. }
            | Act::Count { .. }
            | Act::Pause { .. }
            | Act::Deregister { .. }
            | Act::Rotate { .. }
            | Act::Counted { .. }
            | Act::Promote { .. }
            | Act::Truncate { .. }
            | Act::List { .. }
            | Act::Foreign
            | Act::Nothing => {}
        }
    }

    /// The chunk of an act of an open transaction. Without it, or if the chunk does not
    /// count the act, memory is not what the act was done to: nothing may be counted down.
    fn chunk_in_flight(&mut self, db: Db, number: i64, count: u16) -> Option<u32> {
        let at = self.chunk(db, number).filter(|at| self.chunks[*at].in_flight >= count);
        if at.is_none() {
            self.base(db).replay_due = true;
        }
        at
    }

    pub(super) fn leave_segment(&mut self, db: Db, segment: u8) {
        let entry = &mut self.base(db).segments[usize::from(segment)];
        entry.in_flight = entry.in_flight.saturating_sub(1);
        self.changed(db, segment);
    }

    fn commit_claim(&mut self, db: Db, at: u32, first: i64) {
        if !self.claims.get(at).is_some_and(|c| c.db == db && c.first == first && !c.committed) {
            return;
        }
        self.claims[at].committed = true;
        let Claim { lane, segment, count, open, runtime, .. } = self.claims[at];
        let queue = self.lanes[lane].queue;
        let counts = &mut self.queues[queue].counts;
        counts.available -= i64::from(count);
        counts.running += i64::from(count);
        self.leave_segment(db, segment);
        if open == 0 {
            self.remove_claim(at);
        } else if runtime != NIL && self.runtimes[runtime].dead {
            self.orphaned_something(db);
        }
    }

    fn commit_close(&mut self, db: Db, at: u32, receipt: i64, end: End, now: i64) {
        if !self.items.get(at).is_some_and(|i| i.db == db && i.receipt == receipt) {
            return;
        }
        let Item { claim, position, holds, mark, .. } = self.items[at];
        let Claim { lane, segment, .. } = self.claims[claim];
        match end {
            End::Open => {
                // The next pass looks at others first.
                self.items[at].aside = now.saturating_add(OPEN_ASIDE);
                return self.unhold(at);
            }
            End::Kept(mark) => {
                self.set_mark(at, mark, now);
                self.unhold(at);
                return self.let_go_of(claim);
            }
            // The call that took it failed, yet its transaction committed: cannot be, since
            // an error ends the (sub)transaction. The tables know.
            End::Undecided => {
                self.base(db).replay_due = true;
                return self.unhold(at);
            }
            _ => {}
        }
        let queue = self.lanes[lane].queue;
        let counts = &mut self.queues[queue].counts;
        *(if mark.is_parked() { &mut counts.waiting_external } else { &mut counts.running }) -= 1;
        let finished = match end {
            End::Completed => {
                counts.completed += 1;
                self.queues[queue].completed.add(1, now);
                true
            }
            End::Failed => {
                counts.failed += 1;
                true
            }
            End::Cancelled => {
                counts.cancelled += 1;
                true
            }
            End::Moved => true,
            _ => false,
        };
        self.remove_item(at, now);
        // What else the transaction did to it finds nothing when it is settled later.
        (1..holds).for_each(|_| self.leave_segment(db, segment));
        if finished {
            self.finish_job(db, split(position).0, now);
        }
        self.leave_segment(db, segment);
    }

    /// One job of the chunk got its final disposition.
    pub(super) fn finish_job(&mut self, db: Db, number: i64, now: i64) {
        let Some(at) = self.chunk(db, number) else { return };
        self.chunks[at].live -= 1;
        let segment = self.chunks[at].segment;
        let entry = &mut self.base(db).segments[usize::from(segment)];
        entry.live -= 1;
        entry.last_end = entry.last_end.max(now);
        self.settle_chunk(at);
    }

    /// A sealed segment whose row lacks what a start wants to know: its directory, once no
    /// transaction writes bodies to it, and the news that all its jobs are disposed.
    ///
    /// * `may` - leaves out those that were looked at in vain
    pub fn segment_to_list(
        &mut self,
        db: Db,
        may: impl Fn(u8, &Segment) -> bool,
    ) -> Option<(u8, Segment)> {
        let segments = self.base(db).segments;
        let writes = |segment: u8| {
            self.chunks.indexes().any(|at| {
                let chunk = &self.chunks[at];
                chunk.db == db && chunk.segment == segment && chunk.in_flight > 0
            })
        };
        (0..SEGMENTS as u8).zip(segments).find(|(at, segment)| {
            let finished = segment.live == 0 && segment.in_flight == 0;
            let wanted = !segment.listed || (finished && !segment.disposed);
            segment.state == SegmentState::Sealed && wanted && !writes(*at) && may(*at, segment)
        })
    }

    /// Asks the worker to make room for queues; false when it cannot.
    pub fn ask_for_room(&mut self, db: Db) -> bool {
        if self.segment_to_count(db, |_, _| true).is_none() {
            return false;
        }
        self.base(db).count_due = true;
        self.wake_worker_for(db, i64::MIN);
        true
    }

    /// A segment in which jobs may have ended since its ends were counted last.
    pub fn segment_to_count(
        &mut self,
        db: Db,
        may: impl Fn(u8, &Segment) -> bool,
    ) -> Option<(u8, Segment)> {
        let segments = self.base(db).segments;
        (0..SEGMENTS as u8).zip(segments).find(|(at, segment)| {
            segment.state != SegmentState::Free
                && !segment.disposed
                && segment.live < segment.bodies
                && segment.changes != segment.counted_at
                && may(*at, segment)
        })
    }

    fn commit_rotation(&mut self, db: Db, segment: u8, since: i64) {
        let database = self.base(db);
        if database.current == segment {
            return;
        }
        let former = &mut database.segments[usize::from(database.current)];
        former.state = SegmentState::Sealed;
        former.since = since;
        let next = &mut database.segments[usize::from(segment)];
        next.state = SegmentState::Current;
        next.since = since;
        next.bodies = 0;
        next.live = 0;
        next.last_end = i64::MIN;
        next.counted = 0;
        next.counted_at = 0;
        database.current = segment;
        database.changes += 1;
        // No lane goes on to fill a chunk of the sealed segment.
        let mut from = 0;
        while let Some(lane) = self.lanes.next_used(from) {
            from = lane + 1;
            if self.lanes[lane].db == db {
                self.close_open_chunk(lane);
            }
        }
    }
}
