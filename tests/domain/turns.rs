//! Serial queues: random claims, ends, withdrawals and changes of the setting.

use std::collections::{BTreeMap, BTreeSet};

use crate::domain::dispatcher::*;
use crate::domain::entities::*;
use crate::domain::table::NIL;
use crate::domain::undo::{End, UndoLog};
use crate::memory::{Memory, Sizes};
use crate::world::Dice;

const SIZES: Sizes = Sizes {
    queues: 4,
    lanes: 8,
    chunks: 64,
    pages: 16,
    claims: 400,
    items: 400,
    releases: 2000,
    runtimes: 4,
    doubts: 100,
    waiters: 8,
};
const KEYS: i64 = 5;

/// The key of the job at a position; 0: none.
fn key(position: i64) -> u64 {
    (position % KEYS) as u64
}

struct Tx {
    xid: u32,
    log: UndoLog,
    claimed: Vec<(i64, i64)>,
    closed: Vec<(i64, i64)>,
    /// Of those that were closed: released, not completed.
    released: BTreeSet<i64>,
    withdrawn: Vec<i64>,
}

struct Shop {
    memory: Memory,
    dice: Dice,
    queue: u32,
    serial: bool,
    /// The setting changes now and then.
    changes: bool,
    now: i64,
    xid: u32,
    open: Vec<Tx>,
    /// By position, with the priority.
    live: BTreeMap<i64, u8>,
    /// Those that nobody has claimed, or whose claims were rolled back.
    fresh: BTreeSet<i64>,
    rollbacks: BTreeMap<i64, u8>,
    /// Those of claims that committed.
    tried: BTreeSet<i64>,
    /// Receipts and positions of attempts whose end has not committed.
    attempts: BTreeMap<i64, i64>,
    blocked: u64,
}

fn settings(serial: bool) -> QueueSettings {
    let ordering = if serial { Ordering::Serial } else { Ordering::Lane };
    QueueSettings { ordering, ageing: 0, ..QueueSettings::default() }
}

impl Shop {
    fn new(seed: u64) -> Self {
        let mut memory = Memory::new(&SIZES);
        let mut d = memory.dispatcher();
        let mut segments = [Segment::default(); SEGMENTS];
        segments[0].state = SegmentState::Current;
        d.attach(1, 1, (1, 100_000), &segments, 0, 0).unwrap();
        d.finish_replay(0, (1, 1_000_000), i64::MAX);
        let queue = d.ensure_queue(0, "q").unwrap();
        for priority in [1, 3] {
            let id = d.take_number(0).unwrap();
            d.add_lane(0, queue, priority, 0, id, true).unwrap();
        }
        d.set_settings(queue, settings(true));
        Self {
            memory,
            dice: Dice(seed),
            queue,
            serial: true,
            changes: seed % 2 == 1,
            now: 1_000_000,
            xid: 10,
            open: Vec::new(),
            live: BTreeMap::new(),
            fresh: BTreeSet::new(),
            rollbacks: BTreeMap::new(),
            tried: BTreeSet::new(),
            attempts: BTreeMap::new(),
            blocked: 0,
        }
    }

    fn produce(&mut self) {
        let priority = [1, 3][self.dice.below(2)];
        let mut d = self.memory.dispatcher();
        let mut log = UndoLog::new();
        let want = 1 + self.dice.below(12);
        let granted = d.enqueue(0, "q", (priority, 0), want, self.now, &mut log, 1).unwrap();
        let Granted::Some(grant) = granted else { panic!("{granted:?}") };
        for entry in log.entries() {
            d.settle(entry, self.now);
        }
        for offset in grant.first..grant.first + grant.count {
            let position = position(grant.chunk, offset);
            self.live.insert(position, priority);
            self.fresh.insert(position);
        }
    }

    fn pick(&mut self) -> usize {
        if self.open.is_empty() || (self.open.len() < 4 && self.dice.one_in(2)) {
            self.xid += 1;
            self.open.push(Tx {
                xid: self.xid,
                log: UndoLog::new(),
                claimed: Vec::new(),
                closed: Vec::new(),
                released: BTreeSet::new(),
                withdrawn: Vec::new(),
            });
            return self.open.len() - 1;
        }
        self.dice.below(self.open.len())
    }

    fn claim(&mut self, at: usize, want: usize) -> usize {
        let mut popped = Vec::new();
        let mut heads: Vec<Head> = Vec::with_capacity(1 + self.dice.below(9));
        let mut unsorted: Vec<Unsorted> = Vec::with_capacity(1);
        let mut keys: Vec<(i64, u64)> = Vec::new();
        loop {
            let mut d = self.memory.dispatcher();
            let tx = &mut self.open[at];
            let request = Request {
                db: 0,
                queues: &[self.queue],
                want: want - popped.len(),
                owner: Owner::Lease,
                xid: tx.xid,
                subxact: 1,
                now: self.now,
                deadline: None,
                keys: &keys,
            };
            let before = popped.len();
            let claimed = d.claim(&request, &mut popped, &mut tx.log).unwrap();
            for job in &popped[before..] {
                self.popped(at, job);
            }
            let mut d = self.memory.dispatcher();
            match claimed {
                Claimed::All => return popped.len(),
                Claimed::NeedsTurns(queue) => {
                    unsorted.clear();
                    d.unsorted(queue, &mut unsorted);
                    for item in &unsorted {
                        d.sort(0, item.receipt, key(item.position));
                    }
                }
                Claimed::NeedsKeys { lane, warm_only } => {
                    heads.clear();
                    d.heads(lane, warm_only, &mut heads);
                    assert!(!heads.is_empty());
                    keys.extend(heads.iter().map(|head| (head.position, key(head.position))));
                    keys.sort_unstable();
                    keys.dedup();
                }
                Claimed::NeedsChunk(cold) => panic!("{cold:?}"),
            }
        }
    }

    fn popped(&mut self, at: usize, job: &Popped) {
        let of = key(job.position);
        if self.serial && of != 0 {
            let other = self.attempts.values().find(|position| key(**position) == of);
            assert_eq!(other, None, "another attempt of key {of} is open");
            if self.fresh.contains(&job.position) {
                let earlier = self
                    .fresh
                    .range(..job.position)
                    .find(|position| key(**position) == of && self.live[position] == job.priority);
                assert_eq!(earlier, None, "job {} comes first", job.position);
            }
        }
        self.fresh.remove(&job.position);
        self.attempts.insert(job.receipt, job.position);
        self.open[at].claimed.push((job.receipt, job.position));
    }

    fn close(&mut self, at: usize) {
        let Some((receipt, position)) = self.some_attempt() else { return };
        let mut d = self.memory.dispatcher();
        let tx = &mut self.open[at];
        let taken = d.take(0, receipt, tx.xid, 1, Taker::Operator, &mut tx.log);
        let Take::Taken(item) = taken else { return };
        let mut end = End::Completed;
        if self.dice.one_in(3) {
            let due = self.now + [0, 500_000][self.dice.below(2)];
            let (chunk, offset) = split(position);
            let lane = item.lane;
            let release =
                d.reserve_release(0, (lane, chunk), 1, false, due, &mut tx.log, 1).unwrap();
            d.add_to_release(release, offset);
            end = End::Released(release);
            tx.released.insert(receipt);
        }
        tx.log.decide(item.log, end);
        tx.closed.push((receipt, position));
    }

    fn some_attempt(&mut self) -> Option<(i64, i64)> {
        let at = self.dice.below(self.attempts.len());
        self.attempts.iter().nth(at).map(|(receipt, position)| (*receipt, *position))
    }

    fn withdraw(&mut self, at: usize) {
        let nth = self.dice.below(self.live.len());
        let Some(position) = self.live.keys().nth(nth).copied() else { return };
        let mut d = self.memory.dispatcher();
        let tx = &mut self.open[at];
        let withdrawn = d.withdraw(0, position, true, (tx.xid, 1), &mut tx.log).unwrap();
        if let Withdraw::Withdrawn(_) = withdrawn {
            tx.withdrawn.push(position);
            self.fresh.remove(&position);
        }
    }

    fn end(&mut self, at: usize, commits: bool) {
        let mut tx = self.open.swap_remove(at);
        let mut d = self.memory.dispatcher();
        if commits {
            for entry in tx.log.entries() {
                d.settle(entry, self.now);
            }
            self.tried.extend(tx.claimed.iter().map(|(_, position)| *position));
            for (receipt, position) in tx.closed {
                self.attempts.remove(&receipt);
                if !tx.released.contains(&receipt) {
                    self.live.remove(&position);
                }
            }
            for position in tx.withdrawn {
                self.live.remove(&position);
            }
            return;
        }
        while let Some(entry) = tx.log.pop() {
            d.undo(&entry, self.now);
        }
        for (receipt, position) in tx.claimed {
            self.attempts.remove(&receipt);
            let rollbacks = self.rollbacks.entry(position).or_default();
            *rollbacks += 1;
            // It is as if it had never been claimed, unless that becomes a habit.
            if !self.changes && *rollbacks < 3 && !self.tried.contains(&position) {
                self.fresh.insert(position);
            }
        }
    }

    fn configure(&mut self) {
        self.serial = !self.serial;
        self.memory.dispatcher().set_settings(self.queue, settings(self.serial));
    }

    fn check(&mut self) {
        let d = self.memory.dispatcher();
        let mut blocked = 0;
        for at in d.turns.indexes() {
            let turn = d.turns[at];
            let open = d.items.indexes().filter(|item| d.items[*item].turn == at).count();
            assert_eq!(turn.open as usize, open);
            assert!(open > 0 || turn.next != NIL, "nobody has the turn");
            if turn.next != NIL {
                let next = &d.releases[turn.next];
                assert!(next.turn == at && next.state == ReleaseState::Returned);
                assert_eq!(open, 0);
            }
            for (first, last) in turn.first.into_iter().zip(turn.last) {
                let (mut release, mut before) = (first, NIL);
                while release != NIL {
                    let r = &d.releases[release];
                    assert!(r.turn == at && r.state == ReleaseState::Blocked);
                    blocked += u64::from(r.bits.count());
                    (before, release) = (release, r.next);
                }
                assert_eq!(before, last);
            }
        }
        assert_eq!(d.queues[self.queue].blocked, blocked);
        assert!(self.serial || d.turns.used() == 0);
        let mut jobs = d.items.used() as u64;
        for lane in d.lanes.indexes() {
            let (mut ready, mut at) = (0, d.lanes[lane].returned);
            while at != NIL {
                ready += u64::from(d.releases[at].bits.count());
                at = d.releases[at].next;
            }
            let chunks = d.chunks.indexes().filter(|c| d.chunks[*c].lane == lane);
            ready += chunks.map(|c| u64::from(d.chunks[c].ready)).sum::<u64>();
            assert_eq!(d.lanes[lane].ready, ready);
            jobs += ready;
        }
        let aside = d
            .releases
            .indexes()
            .map(|at| d.releases[at])
            .filter(|r| !matches!(r.state, ReleaseState::Returned | ReleaseState::Pending));
        jobs += aside.map(|r| u64::from(r.bits.count())).sum::<u64>();
        assert_eq!(jobs, self.live.len() as u64);
        self.blocked = self.blocked.max(blocked);
    }

    fn step(&mut self) {
        self.now += self.dice.below(200_000) as i64;
        match self.dice.below(20) {
            0..4 if self.live.len() < 200 => self.produce(),
            4..9 => {
                let (at, want) = (self.pick(), 1 + self.dice.below(4));
                self.claim(at, want);
            }
            9..13 => {
                let at = self.pick();
                self.close(at);
            }
            13 => {
                let at = self.pick();
                self.withdraw(at);
            }
            14 => {
                self.memory.dispatcher().return_due(0, self.now, 10);
            }
            15 if self.changes && self.dice.one_in(2) => self.configure(),
            16.. if !self.open.is_empty() => {
                let at = self.dice.below(self.open.len());
                let commits = !self.dice.one_in(4);
                self.end(at, commits);
            }
            _ => {}
        }
    }

    /// Whatever waits comes to its turn.
    fn drain(&mut self) {
        while !self.open.is_empty() {
            self.end(0, true);
            self.check();
        }
        let mut rounds = 0;
        while !self.live.is_empty() {
            rounds += 1;
            assert!(rounds < 2000, "{} jobs that nobody can claim", self.live.len());
            self.now += 100_000_000;
            self.memory.dispatcher().return_due(0, self.now, 1000);
            let at = self.pick();
            self.claim(at, 50);
            for receipt in self.attempts.keys().copied().collect::<Vec<_>>() {
                let mut d = self.memory.dispatcher();
                let tx = &mut self.open[at];
                let taken = d.take(0, receipt, tx.xid, 1, Taker::Operator, &mut tx.log);
                let Take::Taken(item) = taken else { panic!("{taken:?}") };
                tx.log.decide(item.log, End::Completed);
                tx.closed.push((receipt, item.position));
            }
            self.end(at, true);
            self.check();
        }
        let d = self.memory.dispatcher();
        assert_eq!((d.turns.used(), d.releases.used(), d.items.used()), (0, 0, 0));
        assert_eq!(d.queues[self.queue].blocked, 0);
    }
}

#[test]
fn keys_take_turns() {
    let mut blocked = 0;
    for seed in 0..150 {
        let mut shop = Shop::new(seed);
        for _ in 0..600 {
            shop.step();
            shop.check();
        }
        shop.drain();
        blocked = blocked.max(shop.blocked);
    }
    assert!(blocked > 20);
}

#[test]
fn a_waiter_is_woken_when_a_turn_passes() {
    for commits in [true, false] {
        let mut shop = Shop::new(1);
        let mut d = shop.memory.dispatcher();
        let mut log = UndoLog::new();
        // Two of one key, and whatever lies between them.
        let granted = d.enqueue(0, "q", (1, 0), 1 + KEYS as usize, 0, &mut log, 1).unwrap();
        let Granted::Some(grant) = granted else { panic!("{granted:?}") };
        log.entries().iter().for_each(|entry| d.settle(entry, 0));
        for offset in 0..grant.count {
            shop.live.insert(position(grant.chunk, offset), 1);
        }
        let at = shop.pick();
        let claimed = shop.claim(at, 10);
        let mut d = shop.memory.dispatcher();
        assert_eq!(claimed as u64 + d.queues[shop.queue].blocked, 6);
        assert_eq!((d.claimable(shop.queue), d.queues[shop.queue].blocked), (0, 1));
        assert!(d.start_wait(3, 0, &[shop.queue]));
        d.wakes.clear();
        if commits {
            for (receipt, position) in shop.open[at].claimed.clone() {
                let mut d = shop.memory.dispatcher();
                let tx = &mut shop.open[at];
                let taken = d.take(0, receipt, tx.xid, 1, Taker::Owner, &mut tx.log);
                let Take::Taken(item) = taken else { panic!("{taken:?}") };
                tx.log.decide(item.log, End::Completed);
                tx.closed.push((receipt, position));
            }
        }
        shop.end(at, commits);
        assert_eq!(shop.memory.dispatcher().wakes.as_slice(), [3]);
    }
}
