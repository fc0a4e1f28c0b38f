//! Pages of cold chunks: a chunk in eight bytes.

use super::entities::{Chunk, Db};
use super::table::{Entry, mix};

/// So many that a page is 256 bytes.
pub const PAGE_CHUNKS: usize = 27;

const SEGMENT_BITS: u32 = 4;
/// A chunk has up to 1,024 ready jobs, so 10 bits are one too few.
const READY_BITS: u32 = 11;
const NUMBER_SHIFT: u32 = SEGMENT_BITS + READY_BITS;

/// Cold chunks of one lane, by number. Never empty.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Page {
    pub db: Db,
    pub count: u16,
    pub lane: u32,
    /// Neighbours among the lane's pages.
    pub prev: u32,
    pub next: u32,
    /// When the oldest job in it was enqueued, at the earliest: an age a chunk has no room.
    pub born: i64,
    /// Only tells pages apart in the table.
    key: i64,
    /// number, ready, segment: sorted.
    chunks: [u64; PAGE_CHUNKS],
}

impl Page {
    /// Chunk numbers from here on do not fit, and stay in memory.
    pub const MAX_NUMBER: i64 = 1 << (64 - NUMBER_SHIFT);

    pub fn empty(chunk: &Chunk, prev: u32, next: u32) -> Self {
        let Chunk { db, lane, number, born, .. } = *chunk;
        Self { db, count: 0, lane, prev, next, born, key: number, chunks: [0; PAGE_CHUNKS] }
    }

    fn entries(&self) -> &[u64] {
        &self.chunks[..usize::from(self.count)]
    }

    pub fn is_full(&self) -> bool {
        usize::from(self.count) == PAGE_CHUNKS
    }

    pub fn number(&self, slot: usize) -> i64 {
        (self.chunks[slot] >> NUMBER_SHIFT) as i64
    }

    pub fn last(&self) -> i64 {
        self.number(usize::from(self.count).saturating_sub(1))
    }

    pub fn segment(&self, slot: usize) -> u8 {
        (self.chunks[slot] & ((1 << SEGMENT_BITS) - 1)) as u8
    }

    pub fn ready(&self, slot: usize) -> u16 {
        ((self.chunks[slot] >> SEGMENT_BITS) & ((1 << READY_BITS) - 1)) as u16
    }

    /// Where the number is, or where it belongs.
    pub fn place(&self, number: i64) -> Result<usize, usize> {
        self.entries().binary_search_by_key(&number, |c| (c >> NUMBER_SHIFT) as i64)
    }

    /// The page must not be full, nor hold the number.
    pub fn add(&mut self, chunk: &Chunk) {
        let (Ok(slot) | Err(slot)) = self.place(chunk.number);
        let count = usize::from(self.count);
        self.chunks.copy_within(slot..count, slot + 1);
        self.chunks[slot] = (chunk.number as u64) << NUMBER_SHIFT
            | u64::from(chunk.ready) << SEGMENT_BITS
            | u64::from(chunk.segment);
        self.count += 1;
        self.born = self.born.min(chunk.born);
    }

    pub fn remove(&mut self, slot: usize) {
        let count = usize::from(self.count);
        self.chunks.copy_within(slot + 1..count, slot);
        self.count -= 1;
    }

    /// Moves the upper half to an empty page.
    pub fn move_half(&mut self, to: &mut Self) {
        let (half, count) = (usize::from(self.count) / 2, usize::from(self.count));
        to.chunks[..count - half].copy_from_slice(&self.chunks[half..count]);
        to.count = (count - half) as u16;
        to.born = to.born.min(self.born);
        self.count = half as u16;
    }
}

impl Entry for Page {
    fn hash(&self) -> u64 {
        mix((self.key as u64) << 4 ^ u64::from(self.db))
    }
}
