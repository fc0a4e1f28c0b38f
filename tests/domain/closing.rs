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
        let taker = [Taker::Owner, Taker::Waiter, Taker::Operator][self.dice.below(3)];
        self.close_all(at, &receipts, taker);
    }

    pub fn close_all(&mut self, at: usize, receipts: &[i64], taker: Taker) {
        let fate = self.dice.below(16);
        for receipt in receipts {
            let expected = self.expect_take(at, *receipt, taker);
            let tx = &mut self.open[at];
            let sub = tx.sub();
            let mut d = self.memory.dispatcher();
            let take = d.take(DB, *receipt, tx.xid, sub, taker, &mut tx.log);
            match take {
                Take::Taken(taken) => {
                    assert_eq!(expected, None, "taken");
                    self.taken(at, &taken, fate);
                }
                other => assert_eq!(Some(other), expected),
            }
        }
    }

    pub fn expect_take(&mut self, at: usize, receipt: i64, taker: Taker) -> Option<Take> {
        let xid = self.open[at].xid;
        let Some(&mut Job { state, closing, claim, mark, .. }) = self.truth.job(receipt) else {
            return Some(Take::Stale);
        };
        let owner = self.truth.claims[&claim].runtime;
        let dead = owner.is_some_and(|id| self.truth.dead.contains(&id));
        match (state, closing) {
            (State::Popped { xid: of, .. }, _) if of != xid => Some(Take::Busy(of)),
            (_, Some(closer)) if closer != xid => Some(Take::Busy(closer)),
            (_, closing) => {
                let mark = match closing {
                    Some(_) => self.own_mark(at, receipt, mark),
                    None => Some(mark),
                };
                let Some(mark) = mark else { return Some(Take::Stale) };
                let lost = dead && mark.care == Care::Claimer;
                let admitted = match taker {
                    Taker::Owner => !lost && !mark.is_parked(),
                    Taker::Waiter => !lost,
                    Taker::Operator => true,
                    Taker::Lost => !mark.is_parked(),
                    Taker::Overdue(now) => mark.is_parked() && mark.until <= now,
                };
                (!admitted).then_some(Take::Stale)
            }
        }
    }

    /// What the transaction has made of an attempt so far; None: it ends it.
    pub fn own_mark(&self, at: usize, receipt: i64, mark: Mark) -> Option<Mark> {
        let mut own = Some(mark);
        for entry in self.open[at].log.entries() {
            if let Act::Close { receipt: of, end, .. } = entry.act
                && of == receipt
            {
                own = match end {
                    End::Open => own,
                    End::Kept(mark) => Some(mark),
                    _ => None,
                };
            }
        }
        own
    }

    pub fn taken(&mut self, at: usize, taken: &Taken, fate: usize) {
        let Taken { receipt, position, lane, .. } = *taken;
        let xid = self.open[at].xid;
        let now = self.now;
        let mark = self.truth.job(receipt).unwrap().mark;
        let mark = self.own_mark_before(at, receipt, mark);
        let job = self.truth.job(receipt).unwrap();
        job.closing = Some(xid);
        job.holds += 1;
        let prior = match (job.believed, job.described) {
            (AS_BODY, true) => body_prior(position),
            (believed, _) => believed,
        };
        let used = job.prior.max(0) + 1;
        let (key, segment, claim) = (job.key, job.segment, job.claim);
        assert_eq!((taken.prior, taken.claim, taken.segment), (prior, claim, segment));
        assert_eq!(taken.mark, mark);
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
            8 => End::Kept(Mark { asked: true, ..mark }),
            9..12 => {
                let until = now + [0, 900_000, 5_000_000][self.dice.below(3)];
                End::Kept(Mark { care: Care::Parked, until, ..mark })
            }
            12 if mark.is_parked() => {
                let care = if taken.owned { Care::Claimer } else { Care::Lease };
                End::Kept(Mark { care, until: 0, ..mark })
            }
            // What else its row says is nothing to memory.
            13 => End::Kept(mark),
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
        if let End::Kept(kept) = end {
            let what = match (mark.is_parked(), kept.is_parked()) {
                (_, true) => "park",
                (true, false) => "resume",
                _ => "ask",
            };
            *self.seen.entry(what).or_default() += 1;
        }
        if end == End::Moved && self.dice.one_in(2) {
            let act = Act::Defer { queue: taken.queue, retryable: true, count: 1, due: now + 9 };
            d.note(DB, sub, act, &mut tx.log);
            self.truth.pins[usize::from(key.0)] += 1;
        }
    }

    /// The last entry of the log is the act at hand.
    fn own_mark_before(&mut self, at: usize, receipt: i64, mark: Mark) -> Mark {
        let last = self.open[at].log.pop().unwrap();
        let own = self.own_mark(at, receipt, mark).unwrap();
        self.open[at].log.push(last);
        own
    }

    pub fn extend(&mut self) {
        if self.truth.receipts.is_empty() {
            return;
        }
        let n = self.dice.below(self.truth.receipts.len());
        let receipt = *self.truth.receipts.keys().nth(n).unwrap();
        let Some(at) = self.pick() else { return };
        let (xid, log) = (self.open[at].xid, &self.open[at].log);
        let by = (1_000_000, self.now);
        let result = self.memory.dispatcher().extend(DB, receipt, by, xid, log);
        if let Ok(deadline) = result {
            let now = self.now;
            let mark = self.truth.job(receipt).unwrap().mark;
            let is_closing = self.truth.job(receipt).unwrap().closing.is_some();
            assert!(!is_closing || self.own_mark(at, receipt, mark).is_some());
            let job = self.truth.job(receipt).unwrap();
            if job.deadline < i64::MAX {
                job.deadline = job.deadline.max(now) + 1_000_000;
            }
            assert_eq!(job.deadline, deadline);
            // Its own claim may be open still.
            assert!(match job.state {
                State::Popped { xid: of, .. } => of == xid,
                state => matches!(state, State::Running { .. }),
            });
            assert!(job.closing.is_none_or(|closer| closer == xid));
        }
    }
}
