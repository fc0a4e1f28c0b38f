//! Those who cancel waiting jobs.

use crate::domain::dispatcher::*;
use crate::domain::entities::*;
use crate::truth::*;
use crate::world::*;

impl World {
    pub fn withdraw(&mut self) {
        let Some(at) = self.pick() else { return };
        let position = match self.truth.jobs.len() {
            0 => return,
            _ if self.dice.one_in(30) => i64::MAX >> 1,
            len => *self.truth.jobs.keys().nth(self.dice.below(len)).unwrap(),
        };
        let cancelled = self.dice.one_in(2);
        loop {
            let expected = self.expect_withdraw(at, position);
            let tx = &mut self.open[at];
            let who = (tx.xid, tx.sub());
            let mut d = self.memory.dispatcher();
            let room = d.releases.free();
            let found = d.withdraw(DB, position, cancelled, who, &mut tx.log);
            match found {
                Err(full) => {
                    assert!(full == Full::Timers && room == 0 && expected.is_none());
                    self.saw("no timer to withdraw");
                }
                Ok(Withdraw::NeedsChunk(cold)) => {
                    assert_eq!(expected, None);
                    self.saw("withdrawal met a cold chunk");
                    if self.load(cold) {
                        continue;
                    }
                }
                Ok(Withdraw::Withdrawn(withdrawn)) => {
                    assert_eq!(expected, None);
                    self.withdrawn(at, position, &withdrawn);
                }
                Ok(other) => assert_eq!(Some(other), expected),
            }
            return;
        }
    }

    /// None: it waits, and nobody has withdrawn it.
    fn expect_withdraw(&self, at: usize, position: i64) -> Option<Withdraw> {
        let xid = self.open[at].xid;
        let Some(job) = self.truth.jobs.get(&position) else { return Some(Withdraw::Absent) };
        let busy = |holder| if holder == xid { Withdraw::Own } else { Withdraw::Busy(holder) };
        match (job.state, job.closing) {
            (State::Popped { xid: of, .. }, _) if of != xid => Some(Withdraw::Busy(of)),
            (State::Popped { .. } | State::Running { .. }, Some(closer)) => Some(busy(closer)),
            (State::Popped { receipt, .. } | State::Running { receipt }, None) => {
                Some(Withdraw::Running(receipt))
            }
            _ => job.held.map(busy),
        }
    }

    fn withdrawn(&mut self, at: usize, position: i64, withdrawn: &Withdrawn) {
        self.saw("withdraw");
        let xid = self.open[at].xid;
        let job = self.truth.jobs.get_mut(&position).unwrap();
        job.held = Some(xid);
        assert_eq!((withdrawn.segment, withdrawn.prior), (job.segment, job.believed));
        assert_eq!((withdrawn.priority, withdrawn.shard), (job.key.1, job.key.2));
        assert_eq!(withdrawn.timed, matches!(job.state, State::Timed { .. }));
        self.truth.in_flight[usize::from(job.segment)] += 1;
        self.truth.chunks.get_mut(&split(position).0).unwrap().touched = true;
    }
}
