//! Taking a waiting job out of its place, to end it without a claim.
//!
//! A withdrawn job waits in a release of its own until its transaction ends: it is still
//! one of the jobs in memory, but nobody can claim it. A roll-back puts it back exactly
//! where it was.

use super::*;
use crate::domain::bits::Bits;
use crate::domain::undo::{Act, Entry, UndoLog};
use crate::domain::wheel::Timer;

/// A job that the calling transaction has taken out of its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Withdrawn {
    pub segment: u8,
    pub queue: u32,
    pub priority: u8,
    pub shard: u8,
    /// Attempts used, or AS_BODY.
    pub prior: i16,
    /// It was counted as scheduled or retryable, not as available.
    pub timed: bool,
    pub snoozed: bool,
    /// When it would have become ready, if it was timed.
    pub due: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Withdraw {
    Withdrawn(Withdrawn),
    /// Read which rows of the chunk are committed, `load_chunk`, and ask again.
    NeedsChunk(Cold),
    /// An attempt has it, under this receipt.
    Running(i64),
    /// Another transaction claims, closes or withdraws it: wait for its end and ask again.
    Busy(u32),
    /// The calling transaction is ending it.
    Own,
    /// Memory knows no such job.
    Absent,
}

impl Dispatcher<'_> {
    /// Takes a waiting job out of its place. The log needs room for one entry.
    ///
    /// * `cancelled` - the job counts as cancelled when the transaction commits
    pub fn withdraw(
        &mut self,
        db: Db,
        position: i64,
        cancelled: bool,
        (xid, subxact): (u32, u32),
        log: &mut UndoLog,
    ) -> Result<Withdraw, Full> {
        let (number, offset) = split(position);
        let Some(chunk) = self.chunk(db, number) else {
            return Ok(self.cold(db, number).map_or(Withdraw::Absent, Withdraw::NeedsChunk));
        };
        let Chunk { segment, lane, .. } = self.chunks[chunk];
        let release = match self.hold(db, position, xid)? {
            Some(Ok(release)) => release,
            Some(Err(holder)) if holder == xid => return Ok(Withdraw::Own),
            Some(Err(holder)) => return Ok(Withdraw::Busy(holder)),
            None => return Ok(self.attempt_of(db, position, xid, log)),
        };
        debug_assert!(self.releases[release].bits.contains(offset));
        let generation = self.base(db).generation;
        self.base(db).segments[usize::from(segment)].in_flight += 1;
        self.changed(db, segment);
        let act = Act::Withdraw { release, position, cancelled };
        log.push(Entry { db, generation, subxact, act });
        let Lane { queue, priority, shard, .. } = self.lanes[lane];
        let held = &self.releases[release];
        Ok(Withdraw::Withdrawn(Withdrawn {
            segment,
            queue,
            priority,
            shard,
            prior: held.prior,
            timed: held.home == Home::Timer && held.rollbacks == 0,
            snoozed: held.snoozed,
            due: held.timer.at,
        }))
    }

    /// A job that an open transaction withdraws, taken out of the place it was restored to:
    /// to be named by its doubt, as `Act::Withdraw`. None: it waits nowhere.
    ///
    /// * `holder` - the top transaction
    pub fn restore_withdrawn(
        &mut self,
        db: Db,
        position: i64,
        holder: u32,
    ) -> Result<Option<u32>, Full> {
        Ok(self.hold(db, position, holder)?.and_then(|held| held.ok()))
    }

    /// Moves a waiting job into a release that is held by the transaction; Err: it is held
    /// by that one already; None: it does not wait.
    fn hold(&mut self, db: Db, position: i64, xid: u32) -> Result<Option<Result<u32, u32>>, Full> {
        let (number, offset) = split(position);
        let Some(chunk) = self.chunk(db, number) else { return Ok(None) };
        if self.chunks[chunk].bits.contains(offset) {
            return self.hold_from_chunk(chunk, offset, xid).map(|held| Some(Ok(held)));
        }
        let found = self.releases.indexes().find(|at| {
            let r = &self.releases[*at];
            r.db == db
                && r.chunk == number
                && r.state != ReleaseState::Pending
                && r.bits.contains(offset)
        });
        match found {
            Some(at) if self.releases[at].state == ReleaseState::Held => {
                Ok(Some(Err(self.releases[at].holder)))
            }
            Some(at) => self.hold_from_release(at, offset, xid).map(|held| Some(Ok(held))),
            None => Ok(None),
        }
    }

    fn hold_from_chunk(&mut self, at: u32, offset: u16, xid: u32) -> Result<u32, Full> {
        let Chunk { db, lane, number, born, .. } = self.chunks[at];
        let held = Release {
            state: ReleaseState::Held,
            home: Home::Chunk,
            holder: xid,
            bits: single(offset),
            born,
            ..Release::pending(db, (lane, number), AS_BODY, false, 0)
        };
        let held = self.releases.insert(held).ok_or(Full::Timers)?;
        let chunk = &mut self.chunks[at];
        chunk.touched = true;
        chunk.bits.remove(offset);
        chunk.ready -= 1;
        if chunk.ready == 0 {
            self.unlink_chunk(at);
        }
        self.lanes[lane].ready -= 1;
        Ok(held)
    }

    fn hold_from_release(&mut self, at: u32, offset: u16, xid: u32) -> Result<u32, Full> {
        let from = self.releases[at];
        let is_timed = from.state == ReleaseState::Timed;
        let is_blocked = from.state == ReleaseState::Blocked;
        let held = Release {
            state: ReleaseState::Held,
            home: if is_timed { Home::Timer } else { Home::Lane },
            holder: xid,
            bits: single(offset),
            timer: Timer::stopped(from.timer.at),
            next: NIL,
            // Should it come back, its key is read again.
            turn: NIL,
            ..from
        };
        if from.bits.count() > 1 {
            let held = self.releases.insert(held).ok_or(Full::Timers)?;
            self.releases[at].bits.remove(offset);
            if is_blocked {
                self.queues[self.lanes[from.lane].queue].blocked -= 1;
            } else if !is_timed {
                self.lanes[from.lane].ready -= 1;
                if from.after < 0 && from.bits.first() != self.releases[at].bits.first() {
                    self.reorder_front(at);
                }
            }
            return Ok(held);
        }
        // Its only job: the release itself is held, and a rebuild needs no more of them than
        // there were.
        if is_timed {
            let wheel = &mut self.databases[usize::from(from.db)].release_wheel;
            wheel.stop(&mut self.releases, at);
        } else if is_blocked {
            self.unlink_blocked(at);
        } else {
            self.lanes[from.lane].ready -= 1;
            self.unlink_returned(at);
        }
        self.releases[at] = held;
        if from.state == ReleaseState::Returned && from.turn != NIL {
            self.turns[from.turn].next = NIL;
            self.pass_turn(from.turn, i64::MIN);
        }
        Ok(at)
    }

    /// The attempt that has the job at this position. A walk over all open attempts, for
    /// the few who name a job and not a receipt.
    fn attempt_of(&self, db: Db, position: i64, xid: u32, log: &UndoLog) -> Withdraw {
        let found = self.items.indexes().map(|at| &self.items[at]);
        let Some(item) = found.into_iter().find(|i| i.db == db && i.position == position) else {
            return Withdraw::Absent;
        };
        let claim = &self.claims[item.claim];
        if !claim.committed && claim.xid != xid {
            Withdraw::Busy(claim.xid)
        } else if !item.closing {
            Withdraw::Running(item.receipt)
        } else if item.closer == xid {
            match log.kept(db, item.receipt, item.mark, item.last) {
                Some(_) => Withdraw::Running(item.receipt),
                None => Withdraw::Own,
            }
        } else {
            Withdraw::Busy(item.closer)
        }
    }

    /// Whether the transaction claims, closes or withdraws the job.
    pub fn is_ending(&self, db: Db, position: i64, xid: u32) -> bool {
        let (number, offset) = split(position);
        let mut items = self.items.indexes().map(|at| &self.items[at]);
        let mut held = self.releases.indexes().map(|at| &self.releases[at]);
        items.any(|i| {
            let claim = &self.claims[i.claim];
            let closes = i.closing && i.closer == xid;
            i.db == db && i.position == position && (closes || claim.xid == xid)
        }) || held.any(|r| {
            let holds = r.state == ReleaseState::Held && r.holder == xid;
            r.db == db && holds && r.chunk == number && r.bits.contains(offset)
        })
    }

    fn held_release(&self, db: Db, at: u32, position: i64) -> bool {
        let (number, offset) = split(position);
        self.releases.get(at).is_some_and(|r| {
            r.db == db
                && r.state == ReleaseState::Held
                && r.chunk == number
                && r.bits.contains(offset)
        })
    }

    /// The transaction that withdrew the job committed.
    pub(super) fn commit_withdrawal(
        &mut self,
        db: Db,
        at: u32,
        position: i64,
        cancelled: bool,
        now: i64,
    ) {
        if !self.held_release(db, at, position) {
            return;
        }
        let Release { lane, home, snoozed, rollbacks, chunk, .. } = self.releases[at];
        let counts = &mut self.queues[self.lanes[lane].queue].counts;
        match home {
            Home::Timer if rollbacks == 0 && snoozed => counts.scheduled -= 1,
            Home::Timer if rollbacks == 0 => counts.retryable -= 1,
            _ => counts.available -= 1,
        }
        if cancelled {
            counts.cancelled += 1;
        }
        self.releases.remove(at);
        let segment = self.chunk(db, chunk).map(|at| self.chunks[at].segment);
        self.finish_job(db, chunk, now);
        if let Some(segment) = segment {
            self.leave_segment(db, segment);
        }
    }

    /// It rolled back: the job is where it was.
    pub(super) fn abort_withdrawal(&mut self, db: Db, at: u32, position: i64) {
        if !self.held_release(db, at, position) {
            return;
        }
        let Release { lane, home, timer, chunk: number, after, .. } = self.releases[at];
        let queue = self.lanes[lane].queue;
        let Some(chunk) = self.chunk(db, number) else {
            // Its job is live, so the chunk is there. The tables know.
            self.base(db).replay_due = true;
            return;
        };
        match home {
            Home::Chunk => {
                self.releases.remove(at);
                self.chunks[chunk].bits.insert(split(position).1);
                self.chunks[chunk].ready += 1;
                self.lanes[lane].ready += 1;
                self.link_chunk(chunk);
            }
            Home::Timer => {
                self.start_timer(at, timer.at);
                self.wake_worker_for(db, timer.at);
            }
            Home::Lane if after < 0 => self.return_to_front(at),
            Home::Lane => self.return_by_age(at),
        }
        let segment = self.chunks[chunk].segment;
        self.leave_segment(db, segment);
        if home != Home::Timer {
            self.wake(queue, 1);
        }
    }

    /// Puts a release that stood in its lane back among those that returned before and after
    /// it, or its jobs to those they came with.
    fn return_by_age(&mut self, at: u32) {
        let Release { lane, chunk, prior, rollbacks, born, after, bits, .. } = self.releases[at];
        self.lanes[lane].ready += u64::from(bits.count());
        let (mut before, mut next) = (NIL, self.lanes[lane].returned);
        while let Some(entry) = self.releases.get(next) {
            let same = (entry.after, entry.born, entry.chunk) == (after, born, chunk);
            let is_equal = same && (entry.prior, entry.rollbacks) == (prior, rollbacks);
            if is_equal && entry.turn == NIL {
                self.releases[next].bits.insert_all(&bits);
                self.releases.remove(at);
                return;
            }
            if (entry.after, entry.born) > (after, born) {
                break;
            }
            (before, next) = (next, entry.next);
        }
        self.releases[at].state = ReleaseState::Returned;
        self.link_returned(lane, at, (before, next));
    }

    /// Takes a release out of its lane, wherever it stands.
    pub(super) fn unlink_returned(&mut self, at: u32) {
        let Release { lane, next, .. } = self.releases[at];
        let (mut before, mut entry) = (NIL, self.lanes[lane].returned);
        while entry != at && entry != NIL {
            (before, entry) = (entry, self.releases[entry].next);
        }
        if before == NIL {
            self.lanes[lane].returned = next;
        } else {
            self.releases[before].next = next;
        }
        if next == NIL {
            self.lanes[lane].returned_tail = before;
        }
    }

    /// Whether an open attempt was asked to stop.
    pub fn is_asked(&self, db: Db, receipt: i64) -> bool {
        self.item(db, receipt).is_some_and(|at| self.items[at].mark.asked)
    }

    /// Whether an attempt in the care of a runtime was asked to stop.
    pub(super) fn has_asked(&self, runtime: u32) -> bool {
        // Room for none: false means that there is one.
        !self.asked_of(runtime, &mut Vec::new())
    }

    /// The attempts in the care of a runtime that were asked to stop: receipt, segment,
    /// position; as many as `found` has room for. False when there are more.
    pub fn asked_of(&self, runtime: u32, found: &mut Vec<(i64, u8, i64)>) -> bool {
        let mut claim = self.runtimes[runtime].claims;
        while claim != NIL {
            let Claim { segment, items, next, .. } = self.claims[claim];
            let mut item = items;
            while item != NIL {
                let Item { mark, receipt, position, next, .. } = self.items[item];
                if mark.asked && mark.care == Care::Claimer {
                    if found.len() == found.capacity() {
                        return false;
                    }
                    found.push((receipt, segment, position));
                }
                item = next;
            }
            claim = next;
        }
        true
    }
}

fn single(offset: u16) -> Bits {
    let mut bits = Bits::default();
    bits.insert(offset);
    bits
}
