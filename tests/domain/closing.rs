//! Closers of every kind.

use crate::domain::dispatcher::*;
use crate::domain::entities::*;
use crate::domain::undo::{Act, End};
use crate::truth::*;
use crate::world::*;

impl World {
    pub fn close(&mut self) {
        let Some(at) = self.pick() else { return };
        if self.truth.receipts.is_empty() {
            return;
        }
        let n = self.dice.below(self.truth.receipts.len());
        let count = 1 + self.dice.below(6);
        let mut receipts: Vec<i64> =
            self.truth.receipts.keys().skip(n).take(count).copied().collect();
        if self.dice.one_in(20) {
            receipts.push(self.last_receipt + 5);
        }
        self.close_all(at, &receipts, true);
    }

    pub fn close_all(&mut self, at: usize, receipts: &[i64], for_owner: bool) {
        let fate = self.dice.below(12);
        for receipt in receipts {
            let expected = self.expect_take(at, *receipt, for_owner);
            let tx = &mut self.open[at];
            let sub = tx.sub();
            let mut d = self.memory.dispatcher();
            let take = d.take(DB, *receipt, tx.xid, sub, for_owner, &mut tx.log);
            match take {
                Take::Taken(taken) => {
                    assert_eq!(expected, None, "taken");
                    self.taken(at, &taken, fate);
                }
                other => assert_eq!(Some(other), expected),
            }
        }
    }

    pub fn expect_take(&mut self, at: usize, receipt: i64, for_owner: bool) -> Option<Take> {
        let xid = self.open[at].xid;
        let Some(&mut Job { state, closing, claim, .. }) = self.truth.job(receipt) else {
            return Some(Take::Stale);
        };
        let owner = self.truth.claims[&claim].runtime;
        let dead = owner.is_some_and(|id| self.truth.dead.contains(&id));
        match (state, closing) {
            (State::Popped { xid: of, .. }, _) if of != xid => Some(Take::Busy(of)),
            (_, Some(closer)) if closer == xid => Some(Take::Stale),
            (_, Some(closer)) => Some(Take::Busy(closer)),
            _ if dead && for_owner => Some(Take::Stale),
            _ => None,
        }
    }

    pub fn taken(&mut self, at: usize, taken: &Taken, fate: usize) {
        let Taken { receipt, position, lane, .. } = *taken;
        let xid = self.open[at].xid;
        let now = self.now;
        let job = self.truth.job(receipt).unwrap();
        job.closing = Some(xid);
        let prior = match (job.believed, job.described) {
            (AS_BODY, true) => body_prior(position),
            (believed, _) => believed,
        };
        let used = job.prior.max(0) + 1;
        let (key, segment, claim) = (job.key, job.segment, job.claim);
        assert_eq!((taken.prior, taken.claim, taken.segment), (prior, claim, segment));
        assert_eq!(taken.asked, job.asked);
        assert_eq!(self.truth.ids[&taken.lane_id], key);
        self.truth.in_flight[usize::from(segment)] += 1;
        let tx = &mut self.open[at];
        let sub = tx.sub();
        let mut d = self.memory.dispatcher();
        let end = match fate {
            0..4 => End::Completed,
            4 => End::Failed,
            5 => End::Cancelled,
            6 => End::Moved,
            7 => End::Open,
            8 => End::Asked,
            _ => {
                let (chunk, offset) = split(position);
                let joined = tx.release.filter(|(r, c)| {
                    *c == chunk && self.truth.pending.get(r).is_some_and(|p| p.prior == used)
                });
                let release = match joined {
                    Some((release, _)) => Some(release),
                    None => {
                        let (snoozed, delay) =
                            (self.dice.one_in(2), [0, 700_000, 3_000_000][self.dice.below(3)]);
                        let due = now + delay;
                        let new = d.reserve_release(
                            DB,
                            (lane, chunk),
                            used,
                            snoozed,
                            due,
                            &mut tx.log,
                            sub,
                        );
                        if let Some(release) = new {
                            let pending = Pending { prior: used, snoozed, due };
                            self.truth.pending.insert(release, pending);
                            tx.release = Some((release, chunk));
                        }
                        new
                    }
                };
                match release {
                    Some(release) => {
                        d.add_to_release(release, offset);
                        End::Released(release)
                    }
                    None => End::Moved,
                }
            }
        };
        tx.log.decide(taken.log, end);
        if end == End::Moved && self.dice.one_in(2) {
            let act = Act::Defer { queue: taken.queue, retryable: true, count: 1, due: now + 9 };
            d.note(DB, sub, act, &mut tx.log);
            self.truth.pins[usize::from(key.0)] += 1;
        }
    }

    pub fn extend(&mut self) {
        if self.truth.receipts.is_empty() {
            return;
        }
        let n = self.dice.below(self.truth.receipts.len());
        let receipt = *self.truth.receipts.keys().nth(n).unwrap();
        let result = self.memory.dispatcher().extend(DB, receipt, 1_000_000, self.now);
        if let Ok(deadline) = result {
            let now = self.now;
            let job = self.truth.job(receipt).unwrap();
            if job.deadline < i64::MAX {
                job.deadline = job.deadline.max(now) + 1_000_000;
            }
            assert_eq!(job.deadline, deadline);
            assert!(matches!(job.state, State::Running { .. }) && job.closing.is_none());
        }
    }
}
