//! Jobs that become ready again: given back, released, backed off.

use super::*;
use crate::domain::undo::{Act, Entry, UndoLog};

/// Roll-backs of claims of one job in a row before it is delayed.
const PATIENCE: u8 = 3;
/// The first delay, microseconds; it doubles up to `MAX_DELAY`.
const DELAY: i64 = 1_000_000;
const MAX_DELAY: i64 = 60_000_000;

impl Dispatcher<'_> {
    /// Reserves a release for jobs of one chunk. The caller fills its bits; the commit of
    /// the transaction starts it. The log needs room for one entry.
    ///
    /// None when timers are used up: the job then goes to `deferred_jobs`.
    pub fn reserve_release(
        &mut self,
        db: Db,
        (lane, chunk): (u32, i64),
        prior: i16,
        snoozed: bool,
        due: i64,
        log: &mut UndoLog,
        subxact: u32,
    ) -> Option<u32> {
        let release = Release::pending(db, (lane, chunk), prior, snoozed, due);
        let at = self.releases.insert(release)?;
        let generation = self.base(db).generation;
        log.push(Entry { db, generation, subxact, act: Act::Release { release: at } });
        Some(at)
    }

    /// Whether the index names a release of an open transaction.
    pub(super) fn pending_release(&self, db: Db, at: u32) -> bool {
        let release = self.releases.get(at);
        release.is_some_and(|r| r.db == db && r.state == ReleaseState::Pending)
    }

    pub fn add_to_release(&mut self, release: u32, offset: u16) {
        self.releases[release].bits.insert(offset);
    }

    /// The transaction that reserved it committed.
    pub(super) fn start_release(&mut self, at: u32, now: i64) {
        let Release { db, lane, bits, snoozed, timer, .. } = self.releases[at];
        if bits.is_empty() {
            self.releases.remove(at);
            return;
        }
        let jobs = i64::from(bits.count());
        let queue = self.lanes[lane].queue;
        let counts = &mut self.queues[queue].counts;
        if timer.at <= now {
            counts.available += jobs;
            self.return_release(at, now);
            self.wake(queue, jobs as u64);
        } else {
            if snoozed {
                counts.scheduled += jobs;
            } else {
                counts.retryable += jobs;
            }
            self.start_timer(at, timer.at);
            self.wake_worker_for(db, timer.at);
        }
    }

    pub(super) fn start_timer(&mut self, at: u32, due: i64) {
        let db = self.releases[at].db;
        self.releases[at].state = ReleaseState::Timed;
        self.databases[usize::from(db)].release_wheel.start(&mut self.releases, at, due);
    }

    /// Puts a release at the tail of its lane.
    pub(super) fn return_release(&mut self, at: u32, now: i64) {
        let lane = self.releases[at].lane;
        let release = &mut self.releases[at];
        release.state = ReleaseState::Returned;
        release.born = now;
        release.after = self.lanes[lane].newest;
        release.next = NIL;
        let jobs = u64::from(release.bits.count());
        let entry = &mut self.lanes[lane];
        entry.ready += jobs;
        let tail = core::mem::replace(&mut entry.returned_tail, at);
        if tail == NIL {
            entry.returned = at;
        } else {
            self.releases[tail].next = at;
        }
    }

    /// Puts a release at the front of its lane, among those there in the order of positions.
    pub(super) fn return_to_front(&mut self, at: u32) {
        let Release { lane, bits, .. } = self.releases[at];
        self.lanes[lane].ready += u64::from(bits.count());
        if self.releases[at].turn == NIL && self.merge_at_front(at) {
            return;
        }
        self.releases[at].state = ReleaseState::Returned;
        self.releases[at].after = -1;
        self.place_at_front(at);
    }

    /// Adds the jobs to those of a release at the front that is the same but for them.
    fn merge_at_front(&mut self, at: u32) -> bool {
        let Release { lane, chunk, prior, rollbacks, bits, born, .. } = self.releases[at];
        let mut other = self.lanes[lane].returned;
        while other != NIL && self.releases[other].after < 0 && self.releases[other].chunk <= chunk
        {
            let entry = &mut self.releases[other];
            let same = (entry.chunk, entry.prior, entry.rollbacks) == (chunk, prior, rollbacks);
            if same && entry.turn == NIL {
                entry.bits.insert_all(&bits);
                entry.born = entry.born.min(born);
                self.releases.remove(at);
                self.reorder_front(other);
                return true;
            }
            other = entry.next;
        }
        false
    }

    /// Moves a release of the front to its place after its first job changed.
    pub(super) fn reorder_front(&mut self, at: u32) {
        let Release { lane, next, .. } = self.releases[at];
        let mut before = NIL;
        let mut entry = self.lanes[lane].returned;
        while entry != at && entry != NIL {
            before = entry;
            entry = self.releases[entry].next;
        }
        if before == NIL {
            self.lanes[lane].returned = next;
        } else {
            self.releases[before].next = next;
        }
        if next == NIL {
            self.lanes[lane].returned_tail = before;
        }
        self.place_at_front(at);
    }

    /// The first job of the first release was popped: one behind it may come before the second.
    pub(super) fn popped_from_front(&mut self, at: u32) {
        let Release { after, next, .. } = self.releases[at];
        if after < 0 && next != NIL && self.releases[next].after < 0 {
            let rank = |r: &Release| (r.chunk, r.bits.first());
            if rank(&self.releases[next]) < rank(&self.releases[at]) {
                self.reorder_front(at);
            }
        }
    }

    fn place_at_front(&mut self, at: u32) {
        let lane = self.releases[at].lane;
        let rank = |r: &Release| (r.chunk, r.bits.first());
        let (mut before, mut after) = (NIL, self.lanes[lane].returned);
        while after != NIL
            && self.releases[after].after < 0
            && rank(&self.releases[after]) < rank(&self.releases[at])
        {
            before = after;
            after = self.releases[after].next;
        }
        self.link_returned(lane, at, (before, after));
    }

    /// Puts a release between two of its lane's returned ones; NIL: there is none.
    pub(super) fn link_returned(&mut self, lane: u32, at: u32, (before, after): (u32, u32)) {
        self.releases[at].next = after;
        if before == NIL {
            self.lanes[lane].returned = at;
        } else {
            self.releases[before].next = at;
        }
        if after == NIL {
            self.lanes[lane].returned_tail = at;
        }
    }

    /// Drops the first of the lane's returned releases, whose last job was popped.
    pub(super) fn pop_returned(&mut self, lane: u32) {
        let at = self.lanes[lane].returned;
        let next = self.releases[at].next;
        self.lanes[lane].returned = next;
        if next == NIL {
            self.lanes[lane].returned_tail = NIL;
        }
        self.releases.remove(at);
    }

    /// Makes the jobs ready whose time has come: at most `limit` releases. True when more are due.
    pub fn return_due(&mut self, db: Db, now: i64, limit: usize) -> bool {
        for _ in 0..limit {
            let wheel = &mut self.databases[usize::from(db)].release_wheel;
            let Some(at) = wheel.pop_due(&mut self.releases, now) else { return false };
            let Release { lane, bits, snoozed, rollbacks, .. } = self.releases[at];
            let jobs = i64::from(bits.count());
            let queue = self.lanes[lane].queue;
            // Jobs of rolled-back claims were counted as available all the time.
            if rollbacks == 0 {
                let counts = &mut self.queues[queue].counts;
                counts.available += jobs;
                if snoozed {
                    counts.scheduled -= jobs;
                } else {
                    counts.retryable -= jobs;
                }
            }
            self.return_release(at, now);
            self.wake(queue, jobs as u64);
        }
        true
    }

    /// Gives back what a claim took: its transaction rolled back. Jobs come to the
    /// front of their lane; one whose claims keep rolling back is delayed.
    pub(super) fn give_back_claim(&mut self, claim: u32, now: i64) {
        let Claim { db, lane, .. } = self.claims[claim];
        let queue = self.lanes[lane].queue;
        // Consecutive items that belong into one release.
        let mut run: Option<(i64, i16, u8, u32)> = None;
        let mut jobs = 0;
        while self.claims[claim].items != NIL {
            let at = self.claims[claim].items;
            let Item { position, prior, rollbacks, as_body, holds, turn, .. } = self.items[at];
            let prior = if as_body { AS_BODY } else { prior };
            // After a rebuild, the acts of one transaction may be undone in any order of its
            // subtransactions: the close will not find its item.
            let segment = self.claims[claim].segment;
            (0..holds).for_each(|_| self.leave_segment(db, segment));
            // Its turn is looked at below.
            self.items[at].turn = NIL;
            self.remove_item(at, now);
            jobs += 1;
            let (number, offset) = split(position);
            let rollbacks = rollbacks.saturating_add(1);
            let keeps_turn = self.end_attempt(turn) && rollbacks < PATIENCE;
            if keeps_turn {
                self.finish_give_back(run.take(), now);
            }
            let release = match run {
                Some((n, p, r, release)) if (n, p, r) == (number, prior, rollbacks) => {
                    Some(release)
                }
                _ => {
                    self.finish_give_back(run.take(), now);
                    // They have waited since they were enqueued, as far as it is known.
                    let born = self.chunk(db, number).map_or(now, |c| self.chunks[c].born);
                    self.releases.insert(Release {
                        rollbacks,
                        born: if as_body { born } else { now },
                        ..Release::pending(db, (lane, number), prior, false, now)
                    })
                }
            };
            match release {
                Some(release) if keeps_turn => {
                    // Before those of its key that wait.
                    self.releases[release].bits.insert(offset);
                    self.releases[release].turn = turn;
                    self.turns[turn].next = release;
                    self.return_to_front(release);
                }
                Some(release) => {
                    self.releases[release].bits.insert(offset);
                    run = Some((number, prior, rollbacks, release));
                }
                // Without a release the chunk takes the job back: the count of roll-backs is
                // lost, and the attempts of a job that was tried before are read from the tables.
                None => self.give_back_to_chunk(db, number, offset, prior),
            }
            self.pass_turn(turn, now);
        }
        self.finish_give_back(run, now);
        self.wake(queue, jobs);
    }

    fn finish_give_back(&mut self, run: Option<(i64, i16, u8, u32)>, now: i64) {
        let Some((_, _, rollbacks, release)) = run else { return };
        if rollbacks < PATIENCE {
            self.return_to_front(release);
            return;
        }
        let doublings = u32::from(rollbacks - PATIENCE).min(6);
        let due = now.saturating_add((DELAY << doublings).min(MAX_DELAY));
        let db = self.releases[release].db;
        self.start_timer(release, due);
        self.wake_worker_for(db, due);
    }

    fn give_back_to_chunk(&mut self, db: Db, number: i64, offset: u16, prior: i16) {
        let Some(at) = self.chunk(db, number) else { return };
        if prior != AS_BODY {
            // The number of attempts has no place in a chunk: the tables know it.
            self.base(db).replay_due = true;
        }
        if self.chunks[at].bits.insert(offset) {
            self.chunks[at].ready += 1;
            let lane = self.chunks[at].lane;
            self.lanes[lane].ready += 1;
            self.link_chunk(at);
        }
    }
}
