//! Runtimes that live, beat, fall silent and die; the passes that look after their jobs.

use crate::domain::dispatcher::*;
use crate::domain::entities::*;
use crate::domain::undo::Act;
use crate::memory::runtime;
use crate::truth::*;
use crate::world::*;

impl World {
    pub fn register(&mut self) {
        let Some(at) = self.pick() else { return };
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.next_runtime.to_le_bytes());
        let number = self.next_runtime as u32;
        self.next_runtime += 1;
        let (liveness, timeout) = match self.dice.below(2) {
            0 => (Liveness::Session, 0),
            _ => (Liveness::Heartbeat, 1_000_000 + self.dice.below(30_000_000) as i64),
        };
        let now = self.now;
        let new =
            Runtime { liveness, timeout, proc: number, pid: 1, last_seen: now, ..runtime(id) };
        let tx = &mut self.open[at];
        let sub = tx.sub();
        let mut d = self.memory.dispatcher();
        match d.register(new, now) {
            Ok(runtime) => {
                d.note(DB, sub, Act::Register { runtime, id }, &mut tx.log);
            }
            Err(full) => {
                assert_eq!(full, Full::Runtimes);
                self.saw("runtimes full");
            }
        }
    }

    pub fn bury(&mut self) {
        let Some(victim) = self.live_runtime() else { return };
        let mut d = self.memory.dispatcher();
        let Runtime { id, proc, pid, liveness, .. } = d.runtimes[victim];
        if liveness == Liveness::Session {
            d.bury_session(proc - 1, pid);
            self.truth.dead.insert(id);
        } else if let Some(at) = self.pick() {
            let tx = &mut self.open[at];
            let sub = tx.sub();
            let act = Act::Deregister { runtime: victim, id };
            self.memory.dispatcher().note(DB, sub, act, &mut tx.log);
        }
    }

    pub fn heartbeat(&mut self) {
        if let Some(at) = self.live_runtime() {
            let now = self.now;
            assert!(self.memory.dispatcher().beat(at, now));
        }
        let mut d = self.memory.dispatcher();
        let silent: Vec<([u8; 16], i64)> = d
            .runtimes
            .indexes()
            .map(|r| d.runtimes[r])
            .filter(|r| !r.dead && r.liveness == Liveness::Heartbeat)
            .map(|r| (r.id, r.last_seen + r.timeout))
            .collect();
        let fenced = d.fence_silent(DB, self.now);
        let mut dead = 0;
        for (id, due) in silent {
            let alive = d.runtime(DB, &id).is_some_and(|r| !d.runtimes[r].dead);
            assert!(alive || due <= self.now, "fenced too early");
            assert!(!alive || due > self.now - 1000, "fenced too late");
            if !alive {
                dead += 1;
                self.truth.dead.insert(id);
            }
        }
        assert_eq!(fenced, dead);
    }

    pub fn orphans(&mut self) {
        let Some(at) = self.pick() else { return };
        let (mut expected, mut any): (Vec<i64>, bool) = (Vec::new(), false);
        for job in self.truth.jobs.values() {
            if let State::Running { receipt } = job.state
                && job.closing.is_none()
                && job.mark.care == Care::Claimer
                && self.truth.claims[&job.claim]
                    .runtime
                    .is_some_and(|id| self.truth.dead.contains(&id))
            {
                any = true;
                if job.aside <= self.now {
                    expected.push(receipt);
                }
            }
        }
        expected.sort_unstable();
        let limit = if self.dice.one_in(2) { 3 } else { usize::MAX };
        let mut receipts = Vec::new();
        let mut d = self.memory.dispatcher();
        d.orphaned(DB, self.now, limit, &mut receipts);
        assert!(!d.base(DB).orphans || any, "orphans: {expected:?}");
        assert_eq!(receipts.len(), expected.len().min(limit));
        assert!(receipts.iter().all(|r| expected.binary_search(r).is_ok()));
        if !receipts.is_empty() {
            self.saw("orphans");
            self.close_all(at, &receipts, Taker::Lost);
        }
    }

    pub fn deadlines(&mut self) {
        let Some(at) = self.pick() else { return };
        let limit = if self.dice.one_in(2) { 3 } else { usize::MAX };
        let mut receipts = Vec::new();
        let now = self.now;
        self.memory.dispatcher().expired(DB, now, limit, AGAIN, &mut receipts);
        self.swept = now;
        for receipt in &receipts {
            let job = self.truth.job(*receipt).unwrap();
            assert!(matches!(job.state, State::Running { .. }) && job.closing.is_none());
            assert!(job.deadline <= now && !job.mark.is_parked(), "rescued too early");
            job.deadline = now + AGAIN;
        }
        if self.dice.one_in(4) {
            // The rescue failed.
            return;
        }
        if !receipts.is_empty() {
            self.saw("deadlines");
            self.close_all(at, &receipts, Taker::Lost);
        }
    }

    pub fn callbacks(&mut self) {
        let Some(at) = self.pick() else { return };
        let limit = if self.dice.one_in(2) { 3 } else { usize::MAX };
        let mut receipts = Vec::new();
        let now = self.now;
        self.memory.dispatcher().overdue(DB, now, limit, AGAIN, &mut receipts);
        self.swept_callbacks = now;
        for receipt in &receipts {
            let job = self.truth.job(*receipt).unwrap();
            assert!(matches!(job.state, State::Running { .. }) && job.closing.is_none());
            assert!(job.mark.is_parked() && job.mark.until <= now, "timed out too early");
        }
        if !receipts.is_empty() && !self.dice.one_in(4) {
            self.saw("callbacks");
            self.close_all(at, &receipts, Taker::Overdue(now));
        }
    }
}
