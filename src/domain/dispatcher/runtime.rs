//! Runtimes: who lives, who is gone, and when the worker has to look.

use super::*;
use crate::domain::rescue::Kind;

impl Dispatcher<'_> {
    pub fn register(&mut self, runtime: Runtime, now: i64) -> Result<u32, Full> {
        let Runtime { db, liveness, timeout, .. } = runtime;
        if self.runtimes.free() == 0 {
            self.evict_runtimes(db);
        }
        let at = self.runtimes.insert(runtime).ok_or(Full::Runtimes)?;
        if liveness == Liveness::Heartbeat {
            self.watch_runtime(at, now.saturating_add(timeout));
        }
        Ok(at)
    }

    fn watch_runtime(&mut self, at: u32, due: i64) {
        let db = self.runtimes[at].db;
        self.databases[usize::from(db)].runtime_wheel.start(&mut self.runtimes, at, due);
        self.wake_worker_for(db, due);
    }

    fn evict_runtimes(&mut self, db: Db) {
        let mut from = 0;
        while let Some(at) = self.runtimes.next_used(from) {
            from = at + 1;
            if self.runtimes[at].db == db {
                self.forget_dead_runtime(at);
            }
        }
    }

    /// A heartbeat arrived; false when it is too late. Costs one store: the timer looks
    /// at `last_seen` when it fires.
    pub fn beat(&mut self, at: u32, now: i64) -> bool {
        if self.runtimes[at].dead {
            return false;
        }
        self.runtimes[at].last_seen = now;
        true
    }

    /// Declares the heartbeat runtimes dead that were silent for too long. Returns how many.
    pub fn fence_silent(&mut self, db: Db, now: i64) -> usize {
        let mut fenced = 0;
        loop {
            let wheel = &mut self.databases[usize::from(db)].runtime_wheel;
            let Some(at) = wheel.pop_due(&mut self.runtimes, now) else { return fenced };
            let Runtime { last_seen, timeout, .. } = self.runtimes[at];
            let due = last_seen.saturating_add(timeout);
            if due > now {
                self.watch_runtime(at, due);
            } else {
                self.bury_runtime(at);
                fenced += 1;
            }
        }
    }

    /// From here on its receipts are refused, and its open attempts are the owner pass's.
    pub fn bury_runtime(&mut self, at: u32) {
        let db = self.runtimes[at].db;
        self.runtimes[at].dead = true;
        let database = self.base(db);
        database.ends_noted = false;
        let rest = database.ends_rest;
        self.wake_worker_for(db, rest);
        self.databases[usize::from(db)].runtime_wheel.stop(&mut self.runtimes, at);
        let mut claim = self.runtimes[at].claims;
        while claim != NIL {
            let next = self.claims[claim].next;
            self.let_go(claim);
            claim = next;
        }
        if self.runtimes[at].claims != NIL {
            self.orphaned_something(db);
        } else {
            self.forget_dead_runtime(at);
        }
    }

    /// Whether an act of an open transaction claims for a runtime that died meanwhile.
    pub fn owner_is_dead(&self, entry: &crate::domain::undo::Entry) -> bool {
        let crate::domain::undo::Act::Claim { first, .. } = entry.act else { return false };
        // By its receipt: memory may have been rebuilt since.
        let claim = self.claim_by_first(entry.db, first).map(|at| self.claims[at]);
        claim.is_some_and(|c| c.runtime != NIL && self.runtimes[c.runtime].dead)
    }

    pub(super) fn orphaned_something(&mut self, db: Db) {
        self.base(db).orphans = true;
        self.wake_worker_for(db, i64::MIN);
    }

    pub(super) fn forget_dead_runtime(&mut self, at: u32) {
        let Runtime { dead, claims, .. } = self.runtimes[at];
        if dead && claims == NIL {
            self.runtimes.remove(at);
        }
    }

    /// A backend ended: its session runtimes are gone.
    pub fn bury_session(&mut self, proc: u32, pid: i32) {
        let mut from = 0;
        while let Some(at) = self.runtimes.next_used(from) {
            from = at + 1;
            let runtime = &self.runtimes[at];
            let bound = runtime.proc == proc + 1 && runtime.pid == pid;
            if bound && runtime.liveness == Liveness::Session && !runtime.dead {
                self.bury_runtime(at);
            }
        }
    }

    /// Wakes the worker if it would sleep past `due`.
    pub fn wake_worker_for(&mut self, db: Db, due: i64) {
        let Database { worker, worker_sleeps_until, .. } = *self.base(db);
        if worker != 0 && due < worker_sleeps_until {
            self.base(db).worker_sleeps_until = i64::MIN;
            self.wakes.push(worker - 1);
        }
    }

    /// It leaves in order and its claims go on without it, until their deadlines; one with an
    /// attempt that has none is given to others, since nothing else would end it.
    pub fn retire_runtime(&mut self, at: u32) {
        let mut claim = self.runtimes[at].claims;
        while claim != NIL {
            let Claim { next, items, .. } = self.claims[claim];
            let endless = |item: &Item| item.deadline == i64::MAX && !item.mark.is_parked();
            if !self.any_item(items, endless) {
                self.leave_runtime(claim);
            }
            claim = next;
        }
        self.bury_runtime(at);
    }

    /// Receipts of the open attempts in the care of a runtime that were claimed before a time:
    /// as many as `receipts` has room for. False when there are more.
    pub fn items_of(&self, db: Db, id: &[u8; 16], before: i64, receipts: &mut Vec<i64>) -> bool {
        let Some(at) = self.runtime(db, id) else { return true };
        let mut claim = self.runtimes[at].claims;
        while claim != NIL {
            let Claim { claimed_at, committed, next, .. } = self.claims[claim];
            if committed && claimed_at < before {
                let mut item = self.claims[claim].items;
                while item != NIL {
                    let Item { receipt, mark, next, .. } = self.items[item];
                    if mark.care == Care::Claimer {
                        if receipts.len() == receipts.capacity() {
                            return false;
                        }
                        receipts.push(receipt);
                    }
                    item = next;
                }
            }
            claim = next;
        }
        true
    }

    /// How many open attempts are in the care of a runtime; `by_queue` has them by queue, as
    /// many queues as it has room for.
    pub fn in_flight_of(&self, at: u32, by_queue: &mut Vec<(u32, i64)>) -> i64 {
        let (mut claim, mut total) = (self.runtimes[at].claims, 0);
        while claim != NIL {
            let Claim { lane, items, next, .. } = self.claims[claim];
            let open = self.count_items(items, |item| item.mark.care == Care::Claimer) as i64;
            let queue = self.lanes[lane].queue;
            total += open;
            if let Some((_, count)) = by_queue.iter_mut().find(|(known, _)| *known == queue) {
                *count += open;
            } else if open > 0 && by_queue.len() < by_queue.capacity() {
                by_queue.push((queue, open));
            }
            claim = next;
        }
        total
    }

    /// Of these runtimes, those that do not live; all of them live where memory cannot tell.
    pub fn keep_ended(&mut self, db: Db, ids: &mut Vec<[u8; 16]>) {
        let is_open = self.base(db).phase == Phase::Open;
        let lives =
            |d: &Self, id: &[u8; 16]| d.runtime(db, id).is_some_and(|at| !d.runtimes[at].dead);
        ids.retain(|id| is_open && !lives(self, id));
    }

    /// When the worker has something to do at the latest; MAX: never.
    pub fn next_due(&mut self, db: Db) -> i64 {
        let database = self.base(db);
        let rest = |kind: Kind| database.rescues[kind as usize].rest;
        if database.replay_due || database.doubts_due || database.count_due {
            return i64::MIN;
        }
        let is_open = database.phase == Phase::Open;
        [
            (is_open && !database.ends_noted).then_some(database.ends_rest),
            database.orphans.then(|| rest(Kind::Owner)),
            database.claim_wheel.next_look().map(|at| at.max(rest(Kind::Deadline))),
            database.callback_wheel.next_look().map(|at| at.max(rest(Kind::Callback))),
            database.release_wheel.next_look(),
            database.runtime_wheel.next_look(),
            Some(database.next_deferred),
        ]
        .into_iter()
        .flatten()
        .min()
        .unwrap_or(i64::MAX)
    }
}
