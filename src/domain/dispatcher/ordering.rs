//! Serial queues: of an ordering key, one attempt is open at a time.
//!
//! Only bodies know the keys, so a claim reads those of the first jobs of a lane before it
//! takes any: what is taken is decided in one step, in the order of the lane. A key with an
//! open attempt has a turn. Further jobs of the key that a claim comes across leave their lane
//! and wait for it, out of everybody's way; when the attempt ends, the first of them returns
//! to the front of its lane with the turn. Nothing here belongs to a transaction: who has a
//! turn is whose attempt is open.

use super::claim::Source;
use super::*;
use crate::domain::ageing::effective_priority;

/// A ready job whose ordering key is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    pub position: i64,
    pub segment: u8,
}

/// An open attempt whose ordering key is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unsorted {
    pub receipt: i64,
    pub position: i64,
    pub segment: u8,
}

impl Dispatcher<'_> {
    /// What the row of the queue says. Jobs that wait for a turn which there is no more are
    /// ready.
    pub fn set_settings(&mut self, queue: u32, settings: QueueSettings) {
        self.queues[queue].settings = settings;
        if settings.ordering == Ordering::Lane {
            self.end_turns(queue);
        }
    }

    fn end_turns(&mut self, queue: u32) {
        self.queues[queue].sorted = false;
        if self.turns.used() == 0 {
            return;
        }
        let mut from = 0;
        while let Some(at) = self.turns.next_used(from) {
            from = at + 1;
            if self.turns[at].queue == queue {
                self.end_turn(at);
            }
        }
        let mut from = 0;
        while let Some(at) = self.items.next_used(from) {
            from = at + 1;
            if self.lanes[self.claims[self.items[at].claim].lane].queue == queue {
                self.items[at].sorted = false;
                self.items[at].turn = NIL;
            }
        }
        let jobs = self.claimable(queue);
        self.wake(queue, jobs);
    }

    fn end_turn(&mut self, at: u32) {
        let Turn { first, next, .. } = self.turns[at];
        for mut release in first {
            while release != NIL {
                let behind = self.releases[release].next;
                self.unlink_blocked(release);
                self.releases[release].turn = NIL;
                self.return_to_front(release);
                release = behind;
            }
        }
        if next != NIL {
            self.releases[next].turn = NIL;
        }
        self.turns.remove(at);
    }

    /// Open attempts of the queue whose keys are not known: as many as `found` has room for.
    /// None: all are known from here on.
    pub fn unsorted(&mut self, queue: u32, found: &mut Vec<Unsorted>) {
        for at in self.items.indexes() {
            let Item { claim, sorted, receipt, position, .. } = self.items[at];
            let Claim { lane, segment, .. } = self.claims[claim];
            if sorted || self.lanes[lane].queue != queue {
                continue;
            }
            if found.len() == found.capacity() {
                return;
            }
            found.push(Unsorted { receipt, position, segment });
        }
        let entry = &mut self.queues[queue];
        entry.sorted = found.is_empty() && entry.settings.ordering == Ordering::Serial;
    }

    /// What the body of an open attempt says; 0: it has no ordering key.
    pub fn sort(&mut self, db: Db, receipt: i64, hash: u64) {
        let Some(at) = self.item(db, receipt) else { return };
        let queue = self.lanes[self.claims[self.items[at].claim].lane].queue;
        let is_serial = self.queues[queue].settings.ordering == Ordering::Serial;
        if self.items[at].sorted || !is_serial {
            return;
        }
        self.items[at].sorted = true;
        if hash != 0 {
            let turn = self.turn(queue, hash).or_else(|| self.add_turn(db, queue, hash));
            if let Some(turn) = turn {
                self.turns[turn].open += 1;
                self.items[at].turn = turn;
            }
        }
    }

    /// The first ready jobs of a lane, in the order in which they are claimed: as many as
    /// `heads` has room for. Those whose turn it is are left out: their key is known.
    pub fn heads(&self, lane: u32, warm_only: bool, heads: &mut Vec<Head>) {
        let Lane { db, mut returned, head: mut chunk, .. } = self.lanes[lane];
        let cold = if warm_only { None } else { self.cold_head(lane) };
        let cold = cold.map_or(i64::MAX, |cold| cold.number);
        loop {
            let warm = self.chunks.get(chunk).map_or(i64::MAX, |c| c.number);
            let (number, bits) =
                if returned != NIL && self.releases[returned].after < warm.min(cold) {
                    let Release { chunk, bits, turn, next, .. } = self.releases[returned];
                    returned = next;
                    if turn != NIL {
                        continue;
                    }
                    (chunk, bits)
                } else if chunk != NIL && warm < cold {
                    let Chunk { number, bits, next, .. } = self.chunks[chunk];
                    chunk = next;
                    (number, bits)
                } else {
                    return;
                };
            let Some(at) = self.chunk(db, number) else { continue };
            let segment = self.chunks[at].segment;
            for offset in bits.iter() {
                if heads.len() == heads.capacity() {
                    return;
                }
                heads.push(Head { position: position(number, offset), segment });
            }
        }
    }

    /// The ordering key of the next job of a lane; None: it has to be read.
    pub(super) fn ordering_key(
        &self,
        keys: &[(i64, u64)],
        lane: u32,
        source: &Source,
    ) -> Option<u64> {
        let (number, offset) = match *source {
            Source::Chunk(at) => (self.chunks[at].number, self.chunks[at].bits.first()),
            Source::Cold(_) => return Some(0),
            Source::Release(at) if self.releases[at].turn != NIL => {
                return Some(self.turns[self.releases[at].turn].hash);
            }
            Source::Release(at) => (self.releases[at].chunk, self.releases[at].bits.first()),
        };
        if self.chunk(self.lanes[lane].db, number).is_none() {
            // The claim leaves it out.
            return Some(0);
        }
        let position = position(number, offset?);
        let at = keys.binary_search_by_key(&position, |(position, _)| *position).ok()?;
        keys.get(at).map(|(_, hash)| *hash)
    }

    /// Whether the next job of a lane can be put aside, if its turn has not come. Some releases
    /// are kept for those who could not do without.
    pub(super) fn can_block(&self, queue: u32, hash: u64, source: &Source) -> bool {
        let has_turn =
            matches!(*source, Source::Release(at) if self.releases[at].turn != NIL) || hash == 0;
        has_turn
            || self.releases.free() > self.releases.capacity() / 8
            || self.turn(queue, hash).is_none()
    }

    pub(super) fn turn(&self, queue: u32, hash: u64) -> Option<u32> {
        self.turns.find(Turn::key(queue, hash), |t| t.queue == queue && t.hash == hash)
    }

    fn add_turn(&mut self, db: Db, queue: u32, hash: u64) -> Option<u32> {
        self.turns.insert(Turn::new(db, queue, hash))
    }

    /// An attempt of the key begins, unless the turn is another job's: Err.
    pub(super) fn take_turn(&mut self, db: Db, queue: u32, hash: u64) -> Result<u32, u32> {
        if let Some(taken) = self.turn(queue, hash) {
            return Err(taken);
        }
        let turn = self.add_turn(db, queue, hash).unwrap_or(NIL);
        if turn != NIL {
            self.turns[turn].open = 1;
        }
        Ok(turn)
    }

    /// An attempt has ended, if it had a turn. True when others wait for it and nobody has it.
    pub(super) fn end_attempt(&mut self, turn: u32) -> bool {
        if turn == NIL {
            return false;
        }
        let entry = &mut self.turns[turn];
        entry.open -= 1;
        entry.open == 0 && entry.next == NIL && entry.first != [NIL; 4]
    }

    /// The turn goes to the first of those who wait for it, if nobody has it: as lanes are
    /// chosen. Without any it is over. NIL: nothing happens.
    pub(super) fn pass_turn(&mut self, turn: u32, now: i64) {
        if turn == NIL {
            return;
        }
        let Turn { queue, open, next, first, .. } = self.turns[turn];
        if open > 0 || next != NIL {
            return;
        }
        let ageing = self.queues[queue].settings.ageing;
        let rank = |at: &u32| {
            let Release { lane, born, .. } = self.releases[*at];
            let priority = self.lanes[lane].priority;
            (effective_priority(priority, now.saturating_sub(born), ageing), born, priority)
        };
        match first.into_iter().filter(|at| *at != NIL).min_by_key(rank) {
            None => self.turns.remove(turn),
            Some(release) => {
                self.unlink_blocked(release);
                self.turns[turn].next = release;
                self.return_to_front(release);
                self.wake(queue, 1);
            }
        }
    }

    /// Since when the jobs wait whose turn comes next.
    pub(super) fn oldest_blocked(&self, queue: u32) -> Option<i64> {
        if self.queues[queue].blocked == 0 {
            return None;
        }
        let turns = self.turns.indexes().map(|at| &self.turns[at]).filter(|t| t.queue == queue);
        let first = turns.flat_map(|turn| turn.first).filter(|at| *at != NIL);
        first.map(|at| self.releases[at].born).min()
    }

    /// A job that was taken out of its lane waits for its turn. There is room for one release
    /// (`can_block`).
    pub(super) fn block(
        &mut self,
        turn: u32,
        lane: u32,
        job: i64,
        prior: i16,
        rollbacks: u8,
        now: i64,
    ) {
        let Lane { db, queue, priority, .. } = self.lanes[lane];
        let (number, offset) = split(job);
        self.queues[queue].blocked += 1;
        let of = usize::from(priority - 1);
        let is_same = |r: &Release| {
            (r.lane, r.chunk, r.prior, r.rollbacks) == (lane, number, prior, rollbacks)
        };
        // Jobs that were not tried keep the order of their lane among themselves.
        let is_behind = |r: &Release| {
            let is_new = prior == AS_BODY && r.prior == AS_BODY && r.lane == lane;
            is_new && (r.chunk, r.bits.first()) > (number, Some(offset))
        };
        let (mut before, mut next) = (self.turns[turn].last[of], NIL);
        let at_end = match self.releases.get(before) {
            Some(last) if is_same(last) => {
                self.releases[before].bits.insert(offset);
                return;
            }
            Some(last) => prior != AS_BODY || (last.prior == AS_BODY && !is_behind(last)),
            None => true,
        };
        if !at_end {
            (before, next) = (NIL, self.turns[turn].first[of]);
            while let Some(entry) = self.releases.get(next) {
                if prior == AS_BODY && is_same(entry) {
                    self.releases[next].bits.insert(offset);
                    return;
                }
                if is_behind(entry) {
                    break;
                }
                (before, next) = (next, entry.next);
            }
        }
        // It has waited since it was enqueued, as far as it is known.
        let born = self.chunk(db, number).map_or(now, |at| self.chunks[at].born);
        let mut release = Release {
            state: ReleaseState::Blocked,
            rollbacks,
            born: if prior == AS_BODY { born } else { now },
            after: -1,
            turn,
            ..Release::pending(db, (lane, number), prior, false, now)
        };
        release.bits.insert(offset);
        let Some(at) = self.releases.insert(release) else {
            // Cannot be. The tables know the job.
            self.queues[queue].blocked -= 1;
            self.base(db).replay_due = true;
            return;
        };
        self.link_blocked(at, (before, next));
    }

    /// The first job of a returned release had the turn and is claimed; the others wait again.
    pub(super) fn block_rest(&mut self, at: u32) {
        let Release { lane, turn, bits, .. } = self.releases[at];
        self.unlink_returned(at);
        self.lanes[lane].ready -= u64::from(bits.count());
        let Lane { queue, priority, .. } = self.lanes[lane];
        self.queues[queue].blocked += u64::from(bits.count());
        self.releases[at].state = ReleaseState::Blocked;
        let first = self.turns[turn].first[usize::from(priority - 1)];
        self.link_blocked(at, (NIL, first));
    }

    /// Puts a release between two of those that wait for its turn; NIL: there is none.
    fn link_blocked(&mut self, at: u32, (before, next): (u32, u32)) {
        let Release { lane, turn, .. } = self.releases[at];
        let of = usize::from(self.lanes[lane].priority - 1);
        self.releases[at].next = next;
        match before {
            NIL => self.turns[turn].first[of] = at,
            _ => self.releases[before].next = at,
        }
        if next == NIL {
            self.turns[turn].last[of] = at;
        }
    }

    /// Takes a release out of those that wait for its turn.
    pub(super) fn unlink_blocked(&mut self, at: u32) {
        let Release { lane, turn, bits, next, .. } = self.releases[at];
        let Lane { queue, priority, .. } = self.lanes[lane];
        self.queues[queue].blocked -= u64::from(bits.count());
        let of = usize::from(priority - 1);
        let (mut before, mut entry) = (NIL, self.turns[turn].first[of]);
        while entry != at && entry != NIL {
            (before, entry) = (entry, self.releases[entry].next);
        }
        match before {
            NIL => self.turns[turn].first[of] = next,
            _ => self.releases[before].next = next,
        }
        if next == NIL {
            self.turns[turn].last[of] = before;
        }
    }
}
