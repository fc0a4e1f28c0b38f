//! The end of a transaction: its acts are played forward or undone. Everything here is
//! idempotent, looks entries up by what they are rather than where they were, and cannot fail.

use super::*;
use crate::domain::undo::{Act, End, Entry};

impl Dispatcher<'_> {
    /// Plays an act of a committed transaction forward.
    pub fn settle(&mut self, entry: &Entry, now: i64) {
        if self.base(entry.db).generation != entry.generation {
            self.leave_to_doubts(entry.db);
            return;
        }
        self.commit_act(entry.db, entry.act, now);
    }

    /// Takes back an act of a transaction or subtransaction that was rolled back.
    pub fn undo(&mut self, entry: &Entry, now: i64) {
        if self.base(entry.db).generation != entry.generation {
            self.leave_to_doubts(entry.db);
            return;
        }
        self.abort_act(entry.db, entry.act, now);
    }

    /// Memory was rebuilt meanwhile and holds the act as a doubt: the worker settles it.
    fn leave_to_doubts(&mut self, db: Db) {
        self.base(db).doubts_due = true;
        self.wake_worker_for(db, i64::MIN);
    }

    fn commit_act(&mut self, db: Db, act: Act, now: i64) {
        match act {
            Act::Enqueue { chunk, first, count } => {
                let Some(at) = self.chunk(db, chunk) else { return };
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
            Act::Release { release } => self.start_release(release, now),
            Act::Defer { queue, retryable, count, due } => {
                let counts = &mut self.queues[queue].counts;
                *(if retryable { &mut counts.retryable } else { &mut counts.scheduled }) +=
                    i64::from(count);
                if count > 0 && due < self.base(db).next_deferred {
                    self.base(db).next_deferred = due;
                    self.wake_worker_for(db, due);
                }
            }
            Act::Pause { queue, paused } => {
                self.queues[queue].paused = paused;
                self.queues[queue].version = self.queues[queue].version.wrapping_add(1);
                let jobs = self.claimable(queue);
                self.wake(queue, jobs);
            }
            Act::Configure { queue } => {
                self.queues[queue].loaded = false;
                self.queues[queue].version = self.queues[queue].version.wrapping_add(1);
            }
            Act::Deregister { runtime } => {
                if self.runtimes.get(runtime).is_some_and(|r| r.db == db) {
                    self.bury_runtime(runtime);
                }
            }
            Act::Rotate { segment, since } => self.commit_rotation(db, segment, since),
            Act::Truncate { segment, generation } => {
                let entry = &mut self.base(db).segments[usize::from(segment)];
                *entry = Segment {
                    generation,
                    changes: entry.changes + 1,
                    since: now,
                    ..Default::default()
                };
                self.base(db).changes += 1;
            }
            Act::Foreign => {
                self.base(db).replay_due = true;
                self.wake_worker_for(db, i64::MIN);
            }
            Act::Register { .. } | Act::Nothing => {}
        }
    }

    fn abort_act(&mut self, db: Db, act: Act, now: i64) {
        match act {
            Act::Enqueue { chunk, count, .. } => {
                let Some(at) = self.chunk(db, chunk) else { return };
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
            Act::Close { item, receipt, .. } => {
                if !self.items.get(item).is_some_and(|i| i.db == db && i.receipt == receipt) {
                    return;
                }
                self.items[item].closing = false;
                let Claim { segment, runtime, .. } = self.claims[self.items[item].claim];
                self.leave_segment(db, segment);
                if runtime != NIL && self.runtimes[runtime].dead {
                    self.orphaned_something(db);
                }
            }
            Act::Release { release } => {
                if self.releases.get(release).is_some_and(|r| r.db == db) {
                    self.releases.remove(release);
                }
            }
            Act::Register { runtime } => {
                if self.runtimes.get(runtime).is_some_and(|r| r.db == db) {
                    self.bury_runtime(runtime);
                }
            }
            Act::Lane { .. }
            | Act::Defer { .. }
            | Act::Pause { .. }
            | Act::Configure { .. }
            | Act::Deregister { .. }
            | Act::Rotate { .. }
            | Act::Truncate { .. }
            | Act::Foreign
            | Act::Nothing => {}
        }
    }

    fn leave_segment(&mut self, db: Db, segment: u8) {
        let entry = &mut self.base(db).segments[usize::from(segment)];
        entry.in_flight -= 1;
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
        let Item { claim, position, .. } = self.items[at];
        let Claim { lane, segment, .. } = self.claims[claim];
        let queue = self.lanes[lane].queue;
        let counts = &mut self.queues[queue].counts;
        counts.running -= 1;
        let finished = match end {
            End::Completed => {
                counts.completed += 1;
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
            End::Released(_) => false,
            // The call that took it failed, yet its transaction committed: cannot be, since
            // an error ends the (sub)transaction. The tables know.
            End::Undecided => {
                counts.running += 1;
                self.items[at].closing = false;
                self.base(db).replay_due = true;
                self.leave_segment(db, segment);
                return;
            }
        };
        self.remove_item(at);
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

    /// Keeps the acts of a transaction whose end its backend will not report. False, and
    /// nothing kept, when there is no room.
    pub fn keep_doubts(&mut self, xid: u32, entries: &[Entry]) -> bool {
        if self.doubts.free() < entries.len() {
            return false;
        }
        for (order, entry) in entries.iter().enumerate() {
            let doubt = Doubt { db: entry.db, xid, order: order as u32, act: entry.act };
            if self.base(entry.db).generation == entry.generation {
                self.doubts.insert(doubt);
            }
        }
        true
    }

    /// Forgets the doubts of a transaction whose own backend undoes its acts after all.
    pub fn drop_doubts(&mut self, xid: u32) {
        self.doubts.remove_where(|d| d.xid == xid);
    }

    /// Some transaction whose acts are in doubt, and where to go on from.
    pub fn next_doubt(&self, from: u32) -> Option<(u32, u32)> {
        self.doubts.next_used(from).map(|at| (at + 1, self.doubts[at].xid))
    }

    /// The transaction ended: its doubts become facts.
    pub fn settle_doubts(&mut self, xid: u32, committed: bool, now: i64) {
        while let Some(at) = self.first_doubt(xid, committed) {
            let Doubt { db, act, .. } = self.doubts[at];
            self.doubts.remove(at);
            if committed {
                self.commit_act(db, act, now);
            } else {
                self.abort_act(db, act, now);
            }
        }
    }

    /// In the order of the acts, or against it. Few transactions are in doubt, and few
    /// acts in each, so a walk of the chain is enough.
    fn first_doubt(&self, xid: u32, forward: bool) -> Option<u32> {
        let of_xid = self.doubts.indexes().filter(|at| self.doubts[*at].xid == xid);
        if forward {
            of_xid.min_by_key(|at| self.doubts[*at].order)
        } else {
            of_xid.max_by_key(|at| self.doubts[*at].order)
        }
    }
}
