//! Claimers.

use std::collections::BTreeMap;

use crate::domain::bits::Bits;
use crate::domain::dispatcher::*;
use crate::domain::entities::*;
use crate::truth::*;
use crate::world::*;

impl World {
    pub fn live_runtime(&mut self) -> Option<u32> {
        let dice = self.dice.next() as usize;
        let d = self.memory.dispatcher();
        let live: Vec<u32> = d.runtimes.indexes().filter(|r| !d.runtimes[*r].dead).collect();
        (!live.is_empty()).then(|| live[dice % live.len()])
    }

    pub fn claim(&mut self) {
        let Some(at) = self.pick() else { return };
        let some: Vec<u8> = (0..QUEUES as u8).filter(|_| !self.dice.one_in(3)).collect();
        let want = match self.dice.below(10) {
            0 => 2000,
            1..4 => 20,
            _ => 1 + self.dice.below(4),
        };
        let runtime = if self.dice.one_in(3) { None } else { self.live_runtime() };
        let deadline = match self.dice.below(3) {
            0 => None,
            1 => Some(0),
            _ => Some(self.dice.below(5_000_000) as i64),
        };
        self.claim_from(at, &some, want, runtime, deadline);
    }

    pub fn claim_from(
        &mut self,
        at: usize,
        queues: &[u8],
        mut want: usize,
        runtime: Option<u32>,
        deadline: Option<i64>,
    ) {
        loop {
            let mut d = self.memory.dispatcher();
            let indexes: Vec<u32> =
                queues.iter().filter_map(|q| d.queue(DB, &queue_name(*q))).collect();
            let claimable: u64 = indexes.iter().map(|q| d.claimable(*q)).sum();
            if d.base(DB).next_receipt >= d.base(DB).end_receipt {
                d.base(DB).next_receipt = self.last_receipt + 10;
                d.base(DB).end_receipt = self.last_receipt + 10 + self.settings.receipts;
            }
            let receipts = (d.base(DB).end_receipt - d.base(DB).next_receipt) as usize;
            let room = d.items.free().min(d.claims.free());
            let tx = &mut self.open[at];
            let request = Request {
                db: DB,
                queues: &indexes,
                want,
                owner: runtime.map_or(Owner::Lease, Owner::Runtime),
                xid: tx.xid,
                subxact: tx.sub(),
                now: self.now,
                deadline,
                keys: &[],
            };
            let mut popped = Vec::new();
            let result = d.claim(&request, &mut popped, &mut tx.log);
            let id = runtime.map(|r| d.runtimes[r].id);
            self.popped(at, &popped, id);
            want -= popped.len();
            match result {
                Err(Full::Chunks) => {
                    self.saw("no room for a load");
                    return;
                }
                Err(full) => {
                    assert!(full == Full::OpenClaims && room == 0);
                    self.saw("open claims full");
                    return;
                }
                Ok(Claimed::All) => {
                    let most = (want + popped.len()).min(room).min(receipts);
                    let least = if self.is_crowded() { 1 } else { usize::MAX };
                    let expected = most.min(claimable as usize);
                    let fits = expected.min(least)..=expected;
                    assert!(fits.contains(&popped.len()), "{} of {expected}", popped.len());
                    return;
                }
                Ok(Claimed::NeedsTurns(_) | Claimed::NeedsKeys { .. }) => panic!("serial"),
                Ok(Claimed::NeedsChunk(cold)) => {
                    self.saw("claim met a cold chunk");
                    if !self.load(cold) {
                        return;
                    }
                }
            }
        }
    }

    /// There are cold chunks and no room: what is in memory goes first.
    pub fn is_crowded(&mut self) -> bool {
        let d = self.memory.dispatcher();
        d.chunks.free() == 0 && d.pages.used() > 0
    }

    pub fn load(&mut self, cold: Cold) -> bool {
        let Cold { number, segment, .. } = cold;
        assert_eq!(self.truth.chunks[&number].segment, segment);
        let mut bits = Bits::default();
        for (offset, job) in self.truth.jobs_in(number) {
            assert_eq!(job.state, State::Fresh);
            bits.insert(offset);
        }
        let mut d = self.memory.dispatcher();
        assert_eq!(d.load_chunk(DB, number, &Bits::default()), Ok(Loaded::Differs));
        match d.load_chunk(DB, number, &bits) {
            Ok(Loaded::Ready) => {
                assert_eq!(d.load_chunk(DB, number, &bits), Ok(Loaded::NotCold));
                true
            }
            Err(Full::Chunks) => {
                self.saw("no room for a load");
                false
            }
            other => panic!("{other:?}"),
        }
    }

    /// Somebody acts on a position of a cold chunk.
    pub fn load_early(&mut self) {
        let number = match self.truth.chunks.len() {
            0 => return,
            len => *self.truth.chunks.keys().nth(self.dice.below(len)).unwrap(),
        };
        let d = self.memory.dispatcher();
        if let Some(cold) = d.cold(DB, number) {
            self.saw("cold chunk loaded early");
            self.load(cold);
        }
    }

    pub fn popped(&mut self, at: usize, popped: &[Popped], runtime: Option<[u8; 16]>) {
        let xid = self.open[at].xid;
        let mut lanes: BTreeMap<Key, Vec<(State, i64)>> = BTreeMap::new();
        for p in popped {
            assert!(p.receipt > self.last_receipt, "a receipt twice");
            self.last_receipt = p.receipt;
            let job = self.truth.jobs.get_mut(&p.position).unwrap();
            assert!(job.state.is_ready() && job.held.is_none(), "popped {job:?}");
            assert_eq!((p.prior, p.segment), (job.believed, job.segment));
            assert_eq!(self.truth.ids[&p.lane_id], job.key);
            assert!(!self.truth.paused[usize::from(job.key.0)]);
            lanes.entry(job.key).or_default().push((job.state, p.position));
            if job.state == State::Fresh {
                job.rollbacks = 0;
            }
            job.state = State::Popped { xid, receipt: p.receipt };
            job.deadline = p.deadline;
            job.period = Item::period(p.deadline, self.now);
            job.described = false;
            job.aside = 0;
            job.mark = Mark::default();
            job.claim = p.claim;
            let (key, segment) = (job.key, job.segment);
            self.truth.receipts.insert(p.receipt, p.position);
            let in_flight = &mut self.truth.in_flight[usize::from(segment)];
            let row = self.truth.claims.entry(p.claim).or_insert_with(|| {
                *in_flight += 1;
                ClaimRow { key, segment, runtime, items: Vec::new() }
            });
            assert_eq!((row.key, row.segment), (key, segment));
            assert_eq!(p.receipt - p.claim, row.items.len() as i64, "number in the claim");
            row.items.push((p.receipt, p.position));
        }
        for (key, taken) in lanes {
            self.check_order(key, &taken);
        }
        for p in popped {
            if self.dice.one_in(2) {
                let job = self.truth.jobs.get_mut(&p.position).unwrap();
                job.described = true;
                if self.dice.one_in(3) {
                    job.deadline = self.now + self.dice.below(2_000_000) as i64;
                    job.period = job.deadline - self.now;
                }
                let prior = match job.believed {
                    AS_BODY => body_prior(p.position),
                    known => known,
                };
                let mut d = self.memory.dispatcher();
                d.describe_item(DB, p.receipt, prior, job.deadline);
            }
        }
    }

    /// Jobs given back first, then first attempts, each by position.
    pub fn check_order(&mut self, key: Key, taken: &[(State, i64)]) {
        if self.is_crowded() {
            return;
        }
        let left = |state| {
            let waits = |j: &Job| j.key == key && j.state == state && j.held.is_none();
            self.truth.jobs.iter().find(|(_, j)| waits(j)).map(|(p, _)| *p)
        };
        for class in [State::Front, State::Fresh] {
            let of_class: Vec<i64> = taken.iter().filter(|t| t.0 == class).map(|t| t.1).collect();
            assert!(of_class.is_sorted(), "order of {class:?} jobs: {of_class:?}");
            if let (Some(last), Some(first)) = (of_class.last(), left(class)) {
                assert!(*last < first, "{class:?} job {last} before {first}");
            }
        }
        let front = taken.iter().rposition(|t| t.0 == State::Front);
        let other = taken.iter().position(|t| t.0 != State::Front);
        if let (Some(front), Some(other)) = (front, other) {
            assert!(front < other, "jobs given back come first");
        }
        assert!(other.is_none() || left(State::Front).is_none());
    }
}
