//! Where the tables of the dispatcher lie in the block of shared memory.
//!
//! The sizes follow from settings that only a restart changes, so every process
//! computes the same layout and nothing but the content is shared.

use core::alloc::Layout as Memory;
use core::slice;

use crate::domain::dispatcher::{Dispatcher, Wakes};
use crate::domain::entities::*;
use crate::domain::page::Page;
use crate::domain::table::{Entry, Head, Slot, Table};

/// How many of each; see the settings of the same names.
#[derive(Clone, Copy, Debug)]
pub struct Capacities {
    pub databases: usize,
    pub lanes: usize,
    pub chunks: usize,
    /// Attempts.
    pub open_claims: usize,
    pub runtimes: usize,
    pub timers: usize,
    pub doubts: usize,
    /// Proc numbers: every process that can wait.
    pub procs: usize,
}

/// Offsets from the start of the block.
#[derive(Clone, Copy)]
pub struct Layout {
    capacities: Capacities,
    databases: usize,
    queues: Part,
    lanes: Part,
    chunks: Part,
    pages: Part,
    claims: Part,
    items: Part,
    releases: Part,
    turns: Part,
    runtimes: Part,
    doubts: Part,
    waiters: usize,
    waiting: usize,
    pub size: usize,
}

#[derive(Clone, Copy)]
struct Part {
    head: usize,
    buckets: usize,
    slots: usize,
    bucket_count: usize,
    count: usize,
}

struct Planner {
    end: usize,
}

impl Planner {
    fn place<T>(&mut self, count: usize) -> usize {
        let memory = Memory::new::<T>();
        // Cache lines are not shared between parts.
        let align = memory.align().max(64);
        let at = self.end.next_multiple_of(align);
        self.end = at.saturating_add(memory.size().saturating_mul(count));
        at
    }

    fn table<T>(&mut self, count: usize) -> Part {
        let bucket_count = Table::<'_, Doubt>::buckets_for(count);
        Part {
            head: self.place::<Head>(1),
            buckets: self.place::<u32>(bucket_count),
            slots: self.place::<Slot<T>>(count),
            bucket_count,
            count,
        }
    }
}

impl Layout {
    pub fn new(capacities: Capacities) -> Self {
        let mut plan = Planner { end: 0 };
        Self {
            databases: plan.place::<Database>(capacities.databases),
            queues: plan.table::<Queue>(capacities.lanes),
            lanes: plan.table::<Lane>(capacities.lanes),
            chunks: plan.table::<Chunk>(capacities.chunks),
            // A page holds dozens of cold chunks: many times the backlog that fits warm.
            pages: plan.table::<Page>(capacities.chunks / 4),
            claims: plan.table::<Claim>(capacities.open_claims),
            items: plan.table::<Item>(capacities.open_claims),
            releases: plan.table::<Release>(capacities.timers),
            turns: plan.table::<Turn>(capacities.open_claims + capacities.timers),
            runtimes: plan.table::<Runtime>(capacities.runtimes),
            doubts: plan.table::<Doubt>(capacities.doubts),
            waiters: plan.place::<Waiter>(capacities.procs),
            waiting: plan.place::<[u32; 2]>(1),
            size: plan.end.next_multiple_of(64),
            capacities,
        }
    }

    /// The dispatcher in the block.
    ///
    /// # Safety
    /// `base` is the start of a block of `size` bytes, aligned to a cache line, that was
    /// zeroed and then laid out by `format`, and nobody else looks at it for `'a`: the
    /// dispatcher lock is held exclusively.
    pub unsafe fn view<'a>(&self, base: *mut u8, wakes: &'a mut Wakes) -> Dispatcher<'a> {
        // SAFETY: the parts are disjoint, inside the block, and aligned by `Planner`;
        // all their types are valid as zeros and plain data.
        unsafe {
            Dispatcher {
                databases: slice::from_raw_parts_mut(
                    base.add(self.databases).cast(),
                    self.capacities.databases,
                ),
                queues: table(base, &self.queues),
                lanes: table(base, &self.lanes),
                chunks: table(base, &self.chunks),
                pages: table(base, &self.pages),
                claims: table(base, &self.claims),
                items: table(base, &self.items),
                releases: table(base, &self.releases),
                turns: table(base, &self.turns),
                runtimes: table(base, &self.runtimes),
                doubts: table(base, &self.doubts),
                waiters: slice::from_raw_parts_mut(
                    base.add(self.waiters).cast(),
                    self.capacities.procs,
                ),
                waiting: &mut *base.add(self.waiting).cast(),
                wakes,
            }
        }
    }
}

/// # Safety
/// As `view`.
unsafe fn table<'a, T: Entry>(base: *mut u8, part: &Part) -> Table<'a, T> {
    // SAFETY: as `view`.
    unsafe {
        Table::new(
            &mut *base.add(part.head).cast(),
            slice::from_raw_parts_mut(base.add(part.buckets).cast(), part.bucket_count),
            slice::from_raw_parts_mut(base.add(part.slots).cast(), part.count),
        )
    }
}
