//! Cold chunks: what of a backlog does not fit is dropped to eight bytes a chunk.
//!
//! A chunk that gets no more jobs, has nothing in flight and from which nothing was ever
//! taken is the same set of jobs as its rows, and nobody can change it meanwhile. So its
//! bits can be read back by whoever comes to it, and a load never races with a commit.

use super::*;
use crate::domain::bits::{Bits, CHUNK_SIZE};

/// Slots that one call looks at while the chunk table is not yet full.
const GLANCE: usize = 32;

/// A chunk that is in the tables only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cold {
    pub lane: u32,
    pub number: i64,
    pub segment: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loaded {
    Ready,
    /// Somebody else loaded it.
    NotCold,
    /// The number of jobs is another: they were read from a segment that the chunk has left
    /// meanwhile, or memory is wrong. Ask for the chunk again.
    Differs,
}

impl Dispatcher<'_> {
    /// Chunks that only a load may take, so that a table full of chunks that cannot be
    /// dropped does not keep claimers from the jobs that would free them.
    fn reserve(&self) -> usize {
        (self.chunks.capacity() / 64).max(1)
    }

    /// Makes room for one more chunk: looks for some to cool above three quarters, drops what
    /// it takes when the table is full. False when there is no room.
    pub(super) fn make_room(&mut self, db: Db, for_load: bool) -> bool {
        let capacity = self.chunks.capacity();
        self.cool_some(db, GLANCE, capacity / 4, false);
        let wanted = 1 + if for_load { 0 } else { self.reserve() };
        self.cool_some(db, capacity, wanted, false);
        if self.chunks.free() < wanted {
            self.evict_chunks();
        }
        self.cool_some(db, capacity, wanted, true);
        self.chunks.free() >= wanted
    }

    /// Goes round the table like the hand of a clock until enough is free or so many slots
    /// were seen. The head of a lane is wanted next: it is dropped only in need.
    fn cool_some(&mut self, db: Db, slots: usize, wanted: usize, in_need: bool) {
        for _ in 0..slots {
            if self.chunks.free() >= wanted {
                return;
            }
            let hand = self.base(db).cool_hand;
            let at = self.chunks.next_used(hand).or_else(|| self.chunks.next_used(0));
            let Some(at) = at else { return };
            self.base(db).cool_hand = at + 1;
            if in_need || self.lanes[self.chunks[at].lane].head != at {
                self.cool(at);
            }
        }
    }

    fn is_whole(chunk: &Chunk) -> bool {
        let whole = chunk.in_flight == 0 && chunk.ready > 0 && chunk.ready == chunk.live;
        whole && !chunk.touched && (0..Page::MAX_NUMBER).contains(&chunk.number)
    }

    /// Replay: above three quarters a chunk goes to the pages without a place in the table.
    pub(super) fn restore_cold(&mut self, chunk: &Chunk) -> bool {
        let crowded = self.chunks.free() * 4 < self.chunks.capacity();
        let cold = crowded && Self::is_whole(chunk) && self.add_cold(chunk);
        if cold {
            self.lanes[chunk.lane].cold += 1;
        }
        cold
    }

    /// Drops a chunk from memory if its rows say all about it.
    fn cool(&mut self, at: u32) -> bool {
        let chunk = self.chunks[at];
        let open = self.lanes[chunk.lane].open_chunk == at;
        if open || !Self::is_whole(&chunk) || !self.add_cold(&chunk) {
            return false;
        }
        self.unlink_chunk(at);
        self.chunks.remove(at);
        let lane = &mut self.lanes[chunk.lane];
        lane.chunks -= 1;
        lane.cold += 1;
        true
    }

    /// The chunk of this number, if it is cold. A search through the pages, which are few.
    pub fn cold(&self, db: Db, number: i64) -> Option<Cold> {
        let (page, slot) = self.find_cold(db, number)?;
        let Page { lane, .. } = self.pages[page];
        Some(Cold { lane, number, segment: self.pages[page].segment(slot) })
    }

    /// Whether the lane's next ready job is in a cold chunk, and in which.
    pub(super) fn cold_head(&self, lane: u32) -> Option<Cold> {
        let page = self.lanes[lane].cold_head;
        let entry = self.pages.get(page)?;
        Some(Cold { lane, number: entry.number(0), segment: entry.segment(0) })
    }

    /// Takes a cold chunk into memory again.
    ///
    /// * `bits` - the jobs that its committed rows show
    pub fn load_chunk(&mut self, db: Db, number: i64, bits: &Bits) -> Result<Loaded, Full> {
        let Some((page, slot)) = self.find_cold(db, number) else { return Ok(Loaded::NotCold) };
        let ready = self.pages[page].ready(slot);
        if bits.count() != ready {
            return Ok(Loaded::Differs);
        }
        // The chunk stays cold while others make room for it, but they move it about.
        if !self.make_room(db, true) {
            return Err(Full::Chunks);
        }
        let Some((page, slot)) = self.find_cold(db, number) else { return Ok(Loaded::NotCold) };
        let Page { lane, born, .. } = self.pages[page];
        let segment = self.pages[page].segment(slot);
        let chunk = Chunk {
            allocated: CHUNK_SIZE as u16,
            live: ready,
            ready,
            bits: *bits,
            ..Chunk::empty(db, segment, (lane, number), born)
        };
        let at = self.chunks.insert(chunk).ok_or(Full::Chunks)?;
        self.remove_cold(page, slot);
        self.lanes[lane].chunks += 1;
        self.lanes[lane].cold -= 1;
        self.link_chunk(at);
        Ok(Loaded::Ready)
    }

    /// Every cold chunk of a database: number, segment, ready jobs.
    pub fn for_each_cold(&self, db: Db, mut each: impl FnMut(i64, u8, u16)) {
        for at in self.pages.indexes().filter(|at| self.pages[*at].db == db) {
            let page = &self.pages[at];
            for slot in 0..usize::from(page.count) {
                each(page.number(slot), page.segment(slot), page.ready(slot));
            }
        }
    }

    fn find_cold(&self, db: Db, number: i64) -> Option<(u32, usize)> {
        self.pages.indexes().filter(|at| self.pages[*at].db == db).find_map(|at| {
            let page = &self.pages[at];
            (page.number(0) <= number && number <= page.last())
                .then(|| page.place(number).ok().map(|slot| (at, slot)))
                .flatten()
        })
    }

    /// Puts a chunk into its lane's pages, which are ordered by number.
    fn add_cold(&mut self, chunk: &Chunk) -> bool {
        let Chunk { lane, number, .. } = *chunk;
        // Nearly always the last page.
        let mut at = self.lanes[lane].cold_tail;
        while at != NIL && self.pages[at].number(0) > number {
            at = self.pages[at].prev;
        }
        let at = match at {
            // Before all others: into the first page, or into a new one.
            NIL => match self.lanes[lane].cold_head {
                head if head != NIL && !self.pages[head].is_full() => Some(head),
                _ => self.insert_page(chunk, NIL),
            },
            at if !self.pages[at].is_full() => Some(at),
            at if number > self.pages[at].last() => self.insert_page(chunk, at),
            at => self.split_page(chunk, at),
        };
        let Some(at) = at else { return false };
        self.pages[at].add(chunk);
        true
    }

    /// A new page behind `before`; NIL: at the front.
    fn insert_page(&mut self, chunk: &Chunk, before: u32) -> Option<u32> {
        let lane = chunk.lane;
        let after = match before {
            NIL => self.lanes[lane].cold_head,
            _ => self.pages[before].next,
        };
        let at = self.pages.insert(Page::empty(chunk, before, after))?;
        match before {
            NIL => self.lanes[lane].cold_head = at,
            _ => self.pages[before].next = at,
        }
        match after {
            NIL => self.lanes[lane].cold_tail = at,
            _ => self.pages[after].prev = at,
        }
        Some(at)
    }

    /// Moves the upper half of a page to a new one; the one of the two that takes the chunk.
    fn split_page(&mut self, chunk: &Chunk, at: u32) -> Option<u32> {
        let upper = self.insert_page(chunk, at)?;
        let mut lower = self.pages[at];
        lower.move_half(&mut self.pages[upper]);
        self.pages[at] = lower;
        Some(if chunk.number < self.pages[upper].number(0) { at } else { upper })
    }

    fn remove_cold(&mut self, at: u32, slot: usize) {
        self.pages[at].remove(slot);
        let Page { lane, count, prev, next, .. } = self.pages[at];
        if count > 0 {
            return;
        }
        match prev {
            NIL => self.lanes[lane].cold_head = next,
            _ => self.pages[prev].next = next,
        }
        match next {
            NIL => self.lanes[lane].cold_tail = prev,
            _ => self.pages[next].prev = prev,
        }
        self.pages.remove(at);
    }
}
