//! Memory for a dispatcher, as a server would lay it out.

use crate::domain::bits::Bits;
use crate::domain::dispatcher::{Dispatcher, Wakes};
use crate::domain::entities::*;
use crate::domain::page::Page;
use crate::domain::table::{Entry, Head, NIL, Slot, Table};
use crate::domain::undo::Act;

struct Store<T> {
    head: Head,
    buckets: Vec<u32>,
    slots: Vec<Slot<T>>,
}

impl<T: Entry> Store<T> {
    fn new(capacity: usize, filler: T) -> Self {
        Self {
            head: Head::default(),
            buckets: vec![NIL; Table::<T>::buckets_for(capacity)],
            slots: vec![Slot::vacant(filler); capacity],
        }
    }

    fn table(&mut self) -> Table<'_, T> {
        Table::new(&mut self.head, &mut self.buckets, &mut self.slots)
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub queues: usize,
    pub lanes: usize,
    pub chunks: usize,
    pub pages: usize,
    pub claims: usize,
    pub items: usize,
    pub releases: usize,
    pub runtimes: usize,
    pub doubts: usize,
    pub waiters: usize,
}

pub struct Memory {
    databases: Vec<Database>,
    queues: Store<Queue>,
    lanes: Store<Lane>,
    chunks: Store<Chunk>,
    pages: Store<Page>,
    claims: Store<Claim>,
    items: Store<Item>,
    releases: Store<Release>,
    turns: Store<Turn>,
    runtimes: Store<Runtime>,
    doubts: Store<Doubt>,
    waiters: Vec<Waiter>,
    waiting: [u32; 2],
    wakes: Wakes,
}

pub fn runtime(id: [u8; 16]) -> Runtime {
    Runtime {
        db: 0,
        liveness: Liveness::Session,
        dead: false,
        id,
        proc: 0,
        pid: 0,
        timeout: 0,
        timer: Default::default(),
        last_seen: 0,
        claims: NIL,
        open: 0,
        asked: false,
    }
}

impl Memory {
    pub fn new(sizes: &Sizes) -> Self {
        let chunk = Chunk::empty(0, 0, (0, 0), 0);
        let lane = Lane {
            db: 0,
            priority: 0,
            shard: 0,
            durable: false,
            queue: 0,
            id: 0,
            next: 0,
            open_chunk: 0,
            head: 0,
            tail: 0,
            hint: 0,
            returned: 0,
            returned_tail: 0,
            ready: 0,
            chunks: 0,
            cold: 0,
            cold_head: 0,
            cold_tail: 0,
            newest: 0,
        };
        let claim = Claim {
            db: 0,
            segment: 0,
            committed: false,
            lane: 0,
            first: 0,
            count: 0,
            open: 0,
            items: 0,
            runtime: 0,
            xid: 0,
            claimed_at: 0,
            timer: Default::default(),
            prev: 0,
            next: 0,
        };
        let item = Item {
            aside: 0,
            db: 0,
            closing: false,
            holds: 0,
            last: 0,
            rollbacks: 0,
            as_body: false,
            keyed: false,
            noted: false,
            mark: Mark::default(),
            prior: 0,
            closer: 0,
            claim: 0,
            receipt: 0,
            position: 0,
            deadline: 0,
            period: 0,
            timer: Default::default(),
            sorted: false,
            turn: NIL,
            prev: 0,
            next: 0,
        };
        let release = Release { bits: Bits::default(), ..Release::pending(0, (0, 0), 0, false, 0) };
        let doubt = Doubt { db: 0, xid: 0, order: 0, act: Act::Nothing };
        let mut memory = Self {
            databases: vec![Database::default(); 2],
            queues: Store::new(sizes.queues, Queue::new(0, "", QueueSettings::default())),
            lanes: Store::new(sizes.lanes, lane),
            chunks: Store::new(sizes.chunks, chunk),
            pages: Store::new(sizes.pages, Page::empty(&chunk, 0, 0)),
            claims: Store::new(sizes.claims, claim),
            items: Store::new(sizes.items, item),
            releases: Store::new(sizes.releases, release),
            turns: Store::new(sizes.items + sizes.releases, Turn::new(0, 0, 0)),
            runtimes: Store::new(sizes.runtimes, runtime([0; 16])),
            doubts: Store::new(sizes.doubts, doubt),
            waiters: vec![Waiter::default(); sizes.waiters],
            waiting: [NIL; 2],
            wakes: Wakes::new(),
        };
        memory.dispatcher().format();
        memory
    }

    pub fn dispatcher(&mut self) -> Dispatcher<'_> {
        Dispatcher {
            databases: &mut self.databases,
            queues: self.queues.table(),
            lanes: self.lanes.table(),
            chunks: self.chunks.table(),
            pages: self.pages.table(),
            claims: self.claims.table(),
            items: self.items.table(),
            releases: self.releases.table(),
            turns: self.turns.table(),
            runtimes: self.runtimes.table(),
            doubts: self.doubts.table(),
            waiters: &mut self.waiters,
            waiting: &mut self.waiting,
            wakes: &mut self.wakes,
        }
    }
}
