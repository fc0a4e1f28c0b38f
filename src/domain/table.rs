//! A fixed arena with a chained hash index, over borrowed memory.
//!
//! Shared memory cannot grow, so every entity of the dispatcher lives in a table
//! like this one: entries are named by their index, which stays valid until the
//! entry is removed, and nothing here allocates.

use core::ops::{Index, IndexMut};

/// No entry.
pub const NIL: u32 = u32::MAX;

/// What a table holds. All-zero bytes must be a valid value: shared memory
/// starts out as zeros.
pub trait Entry: Copy {
    /// The hash of the key the entry is found by.
    fn hash(&self) -> u64;
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Slot<T> {
    /// Of the bucket's chain, or of the free list.
    next: u32,
    used: bool,
    value: T,
}

impl<T> Slot<T> {
    /// A slot that no table has used yet; what it holds is never looked at.
    pub fn vacant(value: T) -> Self {
        Self { next: NIL, used: false, value }
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Head {
    free: u32,
    /// Slots from here on were never used, so a start touches none of them.
    fresh: u32,
    used: u32,
}

pub struct Table<'a, T> {
    head: &'a mut Head,
    buckets: &'a mut [u32],
    slots: &'a mut [Slot<T>],
}

/// The finalizer of splitmix64: cheap, and every input bit reaches every output bit.
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl<'a, T: Entry> Table<'a, T> {
    /// Takes over memory that was formatted before (by `format`).
    pub fn new(head: &'a mut Head, buckets: &'a mut [u32], slots: &'a mut [Slot<T>]) -> Self {
        debug_assert!(buckets.len().is_power_of_two());
        Self { head, buckets, slots }
    }

    pub fn format(&mut self) {
        self.buckets.fill(NIL);
        *self.head = Head { free: NIL, fresh: 0, used: 0 };
    }

    /// How many buckets a table of this capacity wants.
    pub fn buckets_for(capacity: usize) -> usize {
        capacity.next_power_of_two()
    }

    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    pub fn used(&self) -> usize {
        self.head.used as usize
    }

    pub fn free(&self) -> usize {
        self.slots.len() - self.used()
    }

    fn bucket(&self, hash: u64) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    pub fn find(&self, hash: u64, is_it: impl Fn(&T) -> bool) -> Option<u32> {
        let mut at = self.buckets[self.bucket(hash)];
        while at != NIL {
            let slot = &self.slots[at as usize];
            if is_it(&slot.value) {
                return Some(at);
            }
            at = slot.next;
        }
        None
    }

    /// None when the table is full.
    pub fn insert(&mut self, value: T) -> Option<u32> {
        let at = if self.head.free != NIL {
            let at = self.head.free;
            self.head.free = self.slots[at as usize].next;
            at
        } else if (self.head.fresh as usize) < self.slots.len() {
            self.head.fresh += 1;
            self.head.fresh - 1
        } else {
            return None;
        };
        let bucket = self.bucket(value.hash());
        self.slots[at as usize] = Slot { next: self.buckets[bucket], used: true, value };
        self.buckets[bucket] = at;
        self.head.used += 1;
        Some(at)
    }

    pub fn remove(&mut self, index: u32) {
        debug_assert!(self.slots[index as usize].used);
        let bucket = self.bucket(self.slots[index as usize].value.hash());
        let mut at = self.buckets[bucket];
        if at == index {
            self.buckets[bucket] = self.slots[index as usize].next;
        } else {
            while self.slots[at as usize].next != index {
                at = self.slots[at as usize].next;
            }
            self.slots[at as usize].next = self.slots[index as usize].next;
        }
        let slot = &mut self.slots[index as usize];
        slot.used = false;
        slot.next = self.head.free;
        self.head.free = index;
        self.head.used -= 1;
    }

    pub fn remove_where(&mut self, is_it: impl Fn(&T) -> bool) {
        let mut from = 0;
        while let Some(at) = self.next_used(from) {
            from = at + 1;
            if is_it(&self[at]) {
                self.remove(at);
            }
        }
    }

    /// The entry, if the index still names one.
    pub fn get(&self, index: u32) -> Option<&T> {
        // What lies above `fresh` is whatever the memory held before it was formatted.
        let taken = &self.slots[..self.head.fresh as usize];
        taken.get(index as usize).filter(|s| s.used).map(|s| &s.value)
    }

    /// Indexes of all entries that are in use.
    pub fn indexes(&self) -> impl Iterator<Item = u32> + use<'_, 'a, T> {
        (0..self.head.fresh).filter(|i| self.slots[*i as usize].used)
    }

    /// The first entry in use at or after an index: walks a table that changes on the way.
    pub fn next_used(&self, from: u32) -> Option<u32> {
        (from..self.head.fresh).find(|i| self.slots[*i as usize].used)
    }
}

impl<T: Entry> Index<u32> for Table<'_, T> {
    type Output = T;

    fn index(&self, index: u32) -> &T {
        debug_assert!(self.slots[index as usize].used);
        &self.slots[index as usize].value
    }
}

impl<T: Entry> IndexMut<u32> for Table<'_, T> {
    fn index_mut(&mut self, index: u32) -> &mut T {
        debug_assert!(self.slots[index as usize].used);
        &mut self.slots[index as usize].value
    }
}
