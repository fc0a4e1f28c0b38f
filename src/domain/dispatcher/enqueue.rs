//! Positions for new jobs.

use super::*;
use crate::domain::bits::CHUNK_SIZE;
use crate::domain::undo::{Act, Entry, UndoLog};

/// Offsets of one chunk, to be written by the calling transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    pub chunk: i64,
    pub first: u16,
    pub count: u16,
    pub segment: u8,
    pub lane_id: i64,
    /// The caller writes the lane's row: it is not known to be durable.
    pub write_lane: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Granted {
    Some(Grant),
    /// The lane is not in memory: look it up in the table, then `add_lane`.
    NeedsLane,
    /// Chunk numbers are used up: take a block from the sequence, then `add_block`.
    NeedsBlock,
}

impl Dispatcher<'_> {
    /// A producer is about to get places for rows and to write them. Returns what
    /// `end_write` wants.
    pub fn begin_write(&mut self, db: Db) -> u64 {
        let database = self.base(db);
        database.writers += 1;
        database.generation
    }

    /// Its rows are written, or never will be. False when a rebuild has begun meanwhile and
    /// did not wait: it may have passed by the rows.
    #[must_use]
    pub fn end_write(&mut self, db: Db, generation: u64) -> bool {
        let database = self.base(db);
        if database.generation == generation {
            database.writers = database.writers.saturating_sub(1);
            return true;
        }
        let awaited = database.straggling == generation && database.stragglers > 0;
        if awaited {
            database.stragglers -= 1;
        }
        awaited
    }

    /// Adds chunk numbers nobody used. A block that came too late is left unused: while
    /// the last one is not used up, and also when a later one was handed out already (numbers
    /// must grow, and those below the floor are replay's).
    pub fn add_block(&mut self, db: Db, first: i64, count: i64) {
        let database = self.base(db);
        if database.next_chunk >= database.end_chunk && first >= database.next_chunk {
            database.next_chunk = first;
            database.end_chunk = first + count;
        }
    }

    /// The next chunk number, also used as the id of a new lane.
    pub fn take_number(&mut self, db: Db) -> Option<i64> {
        let database = self.base(db);
        if database.next_chunk >= database.end_chunk {
            return None;
        }
        database.next_chunk += 1;
        Some(database.next_chunk - 1)
    }

    /// A job id that is no position of a ready job.
    pub fn take_id(&mut self, db: Db) -> Option<i64> {
        if self.base(db).next_id >= self.base(db).end_id {
            let number = self.take_number(db)?;
            let database = self.base(db);
            database.next_id = position(number, 0);
            database.end_id = database.next_id + CHUNK_SIZE as i64;
        }
        let database = self.base(db);
        database.next_id += 1;
        Some(database.next_id - 1)
    }

    /// Hands out up to `want` offsets of one chunk of the lane. Call it again for the rest.
    ///
    /// A call for a whole chunk gets a fresh one; smaller ones share the lane's open chunk.
    ///
    /// * `born` - since when the oldest of the jobs waits; a chunk has the age of its oldest job
    pub fn enqueue(
        &mut self,
        db: Db,
        queue: &str,
        (priority, shard): (u8, u8),
        want: usize,
        born: i64,
        log: &mut UndoLog,
        subxact: u32,
    ) -> Result<Granted, Full> {
        let Some(lane) = self.queue(db, queue).and_then(|q| self.lane(q, priority, shard)) else {
            return Ok(Granted::NeedsLane);
        };
        let Database { current, generation, .. } = *self.base(db);
        let open = self.lanes[lane].open_chunk;
        let usable = want < CHUNK_SIZE && open != NIL && self.chunks[open].segment == current;
        let at = if usable {
            open
        } else {
            if !self.make_room(db, false) {
                return Err(Full::Chunks);
            }
            let Some(number) = self.take_number(db) else { return Ok(Granted::NeedsBlock) };
            if want < CHUNK_SIZE {
                self.close_open_chunk(lane);
            }
            let chunk = Chunk::empty(db, current, (lane, number), born);
            let at = self.chunks.insert(chunk).ok_or(Full::Chunks)?;
            let entry = &mut self.lanes[lane];
            entry.chunks += 1;
            entry.newest = entry.newest.max(number);
            if want < CHUNK_SIZE {
                entry.open_chunk = at;
            }
            at
        };
        let chunk = &mut self.chunks[at];
        let is_empty = chunk.ready == 0 && chunk.in_flight == 0;
        chunk.born = if is_empty { born } else { chunk.born.min(born) };
        let first = chunk.allocated;
        let count = want.min(CHUNK_SIZE - usize::from(first)) as u16;
        chunk.allocated += count;
        chunk.in_flight += count;
        let (number, full) = (chunk.number, chunk.is_full());
        let entry = &mut self.lanes[lane];
        if full && entry.open_chunk == at {
            entry.open_chunk = NIL;
        }
        let (lane_id, write_lane) = (entry.id, !entry.durable);
        self.base(db).segments[usize::from(current)].in_flight += 1;
        self.changed(db, current);
        let act = Act::Enqueue { chunk: number, first, count };
        log.push(Entry { db, generation, subxact, act });
        Ok(Granted::Some(Grant {
            chunk: number,
            first,
            count,
            segment: current,
            lane_id,
            write_lane,
        }))
    }

    /// No more jobs go into the lane's open chunk.
    pub(super) fn close_open_chunk(&mut self, lane: u32) {
        let open = core::mem::replace(&mut self.lanes[lane].open_chunk, NIL);
        if open != NIL {
            self.settle_chunk(open);
        }
    }

    /// Closes the lane's open chunk if it holds no job, which frees it. One with jobs
    /// stays open: closing it would free nothing and cost the lane a new one.
    pub(super) fn close_idle_chunk(&mut self, lane: u32) {
        let open = self.lanes[lane].open_chunk;
        if open != NIL && self.chunks[open].live == 0 && self.chunks[open].in_flight == 0 {
            self.close_open_chunk(lane);
        }
    }

    /// Frees the idle open chunks of every database: they share the table.
    pub(super) fn evict_chunks(&mut self) {
        let mut from = 0;
        while let Some(lane) = self.lanes.next_used(from) {
            from = lane + 1;
            self.close_idle_chunk(lane);
        }
    }

    /// Drops a chunk that can never hold a job again.
    pub(super) fn settle_chunk(&mut self, at: u32) {
        let chunk = &self.chunks[at];
        let lane = chunk.lane;
        if chunk.live == 0 && chunk.in_flight == 0 && self.lanes[lane].open_chunk != at {
            self.unlink_chunk(at);
            self.chunks.remove(at);
            self.lanes[lane].chunks -= 1;
        }
    }

    /// Puts a chunk that has ready jobs into its lane's list, which is ordered by number.
    pub(super) fn link_chunk(&mut self, at: u32) {
        if self.chunks[at].linked {
            return;
        }
        let (lane, number) = (self.chunks[at].lane, self.chunks[at].number);
        let Lane { head, tail, hint, .. } = self.lanes[lane];
        // The one it goes behind; NIL: first.
        let before = if tail == NIL || number < self.chunks[head].number {
            NIL
        } else if number > self.chunks[tail].number {
            tail
        } else {
            let mut at = if hint != NIL && self.chunks[hint].number < number { hint } else { head };
            loop {
                let next = self.chunks[at].next;
                if next == NIL || self.chunks[next].number > number {
                    break at;
                }
                at = next;
            }
        };
        let after = if before == NIL { head } else { self.chunks[before].next };
        let chunk = &mut self.chunks[at];
        chunk.linked = true;
        chunk.prev = before;
        chunk.next = after;
        if before == NIL {
            self.lanes[lane].head = at;
        } else {
            self.chunks[before].next = at;
        }
        if after == NIL {
            self.lanes[lane].tail = at;
        } else {
            self.chunks[after].prev = at;
        }
        self.lanes[lane].hint = at;
    }

    pub(super) fn unlink_chunk(&mut self, at: u32) {
        let Chunk { lane, linked, prev, next, .. } = self.chunks[at];
        if !linked {
            return;
        }
        if prev == NIL {
            self.lanes[lane].head = next;
        } else {
            self.chunks[prev].next = next;
        }
        if next == NIL {
            self.lanes[lane].tail = prev;
        } else {
            self.chunks[next].prev = prev;
        }
        if self.lanes[lane].hint == at {
            self.lanes[lane].hint = prev;
        }
        self.chunks[at].linked = false;
    }
}
