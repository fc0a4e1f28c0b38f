//! Transactions, workers and time around a dispatcher, driven by random choices.

use std::collections::BTreeMap;

use crate::check::Check;
use crate::domain::entities::*;
use crate::domain::undo::{Act, Entry, UndoLog};
use crate::memory::{Memory, Sizes};
use crate::truth::*;

/// splitmix64
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

pub struct Sub {
    pub id: u32,
    /// Its own, and those of the subtransactions it took over.
    pub xids: Vec<u32>,
}

pub struct Tx {
    pub xid: u32,
    pub log: UndoLog,
    pub subs: Vec<Sub>,
    pub next_sub: u32,
    /// A release that later closes may join.
    pub release: Option<(u32, i64)>,
}

impl Tx {
    pub fn has(&self, is_it: impl Fn(Act) -> bool) -> bool {
        self.log.entries().iter().any(|e| is_it(e.act))
    }

    pub fn sub(&self) -> u32 {
        self.subs.last().unwrap().id
    }
}

pub struct Prepared {
    pub xids: Vec<u32>,
    pub entries: Vec<Entry>,
}

#[derive(Clone, Copy)]
pub struct Settings {
    pub sizes: Sizes,
    /// Calls for more than a chunk happen.
    pub bulk: bool,
    /// Receipts handed to the dispatcher at a time.
    pub receipts: i64,
    pub open: usize,
    /// Above so many jobs nothing is enqueued.
    pub jobs: usize,
}

pub struct World {
    pub memory: Memory,
    pub truth: Truth,
    pub dice: Dice,
    pub settings: Settings,
    pub now: i64,
    pub open: Vec<Tx>,
    pub prepared: Vec<Prepared>,
    pub next_block: i64,
    pub next_xid: u32,
    pub last_receipt: i64,
    pub next_runtime: u64,
    pub swept: i64,
    /// What happened how often, to see that everything does.
    pub seen: BTreeMap<&'static str, u64>,
}

pub const DB: Db = 0;
pub const AGAIN: i64 = 1_500_000;

impl World {
    pub fn new(seed: u64, settings: Settings) -> Self {
        let mut truth = Truth::default();
        truth.segments[0].state = SegmentState::Current;
        let mut world = Self {
            memory: Memory::new(&settings.sizes),
            truth,
            dice: Dice(seed),
            settings,
            now: 1_000_000_000,
            open: Vec::new(),
            prepared: Vec::new(),
            next_block: 1,
            next_xid: 100,
            last_receipt: 1000,
            next_runtime: 1,
            swept: 0,
            seen: BTreeMap::new(),
        };
        let block = world.block();
        let (segments, now) = (world.truth.segments, world.now);
        let mut d = world.memory.dispatcher();
        let db = d.attach(7, 8, block, &segments, 0, now).unwrap();
        assert_eq!(db, DB);
        d.finish_replay(DB, (0, 0), i64::MAX);
        world
    }

    pub fn saw(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    pub fn block(&mut self) -> (i64, i64) {
        let count = 1 + self.dice.below(20) as i64;
        let first = self.next_block;
        self.next_block += count;
        (first, count)
    }

    pub fn xid(&mut self) -> u32 {
        self.next_xid += 1;
        self.next_xid
    }

    pub fn check(&mut self) {
        let d = self.memory.dispatcher();
        Check { d: &d, truth: &self.truth, swept: self.swept, again: AGAIN }.run();
    }

    pub fn step(&mut self) {
        if self.dice.one_in(3) {
            self.now += match self.dice.below(20) {
                0 => 100_000_000,
                1..5 => 1_000_000,
                _ => self.dice.below(2000) as i64,
            };
        }
        match self.dice.below(100) {
            0..6 => self.begin(),
            6..26 => self.enqueue(),
            26..42 => self.claim(),
            42..57 => self.close(),
            57..60 => self.withdraw(),
            60..63 => self.savepoint(),
            63..66 => self.end_savepoint(),
            66..74 => self.end(),
            74..76 => self.prepare(),
            76..78 => self.settle_prepared(),
            78..80 => self.register(),
            80 => self.bury(),
            81..83 => self.heartbeat(),
            83 => self.orphans(),
            84 => self.deadlines(),
            85..88 => self.return_due(),
            88..90 => self.rotate(),
            90 => self.truncate(),
            91..94 => self.waiter(),
            94..96 => self.note(),
            96 => self.extend(),
            97 => self.load_early(),
            98 => self.evict(),
            _ => self.rebuild(),
        }
    }
}
