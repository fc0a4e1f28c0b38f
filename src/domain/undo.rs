//! What a transaction did to shared memory, in order.
//!
//! The log lives in the backend. Room is made before shared memory is touched, so
//! an act and its entry are one step: nothing can fail between them.

use super::entities::Mark;

/// How an item ends when its transaction commits.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum End {
    /// The call that took the item has not decided yet; such a call cannot commit.
    #[default]
    Undecided,
    /// It does not: the call could not close it now and left it open.
    Open,
    /// It does not either, but its row in `attempt_state` says this of it now.
    Kept(Mark),
    Completed,
    Failed,
    Cancelled,
    /// Copied to `deferred_jobs`, the DLQ or another segment.
    Moved,
    /// Ready again, through this release.
    Released(u32),
}

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Act {
    #[default]
    Nothing,
    /// Bodies were written at these offsets.
    Enqueue {
        chunk: i64,
        first: u16,
        count: u16,
    },
    /// The row of the lane was written.
    Lane {
        lane: u32,
        id: i64,
    },
    Claim {
        claim: u32,
        first: i64,
    },
    Close {
        item: u32,
        receipt: i64,
        end: End,
    },
    /// A release was reserved for the Close entries that follow it.
    Release {
        release: u32,
    },
    /// A waiting job was taken out of its place into this release, to end unclaimed.
    Withdraw {
        release: u32,
        position: i64,
        cancelled: bool,
    },
    /// Rows were put into (or taken out of) `deferred_jobs`.
    Defer {
        queue: u32,
        retryable: bool,
        count: i32,
        due: i64,
    },
    /// The queue's row counts these ends now: memory no longer has to.
    Count {
        queue: u32,
        completed: i64,
        failed: i64,
        cancelled: i64,
    },
    Pause {
        queue: u32,
        paused: bool,
    },
    /// Settings of the queue changed in the table: read them again.
    Configure {
        queue: u32,
    },
    Register {
        runtime: u32,
        id: [u8; 16],
    },
    Deregister {
        runtime: u32,
        id: [u8; 16],
    },
    /// The segment became current; the former one is sealed.
    Rotate {
        segment: u8,
        since: i64,
    },
    /// The segment was truncated.
    Truncate {
        segment: u8,
        generation: i64,
    },
    /// The row of the segment has its directory, and tells when no job is left.
    List {
        segment: u8,
        generation: i64,
        disposed: bool,
    },
    /// The totals of queues count ends of the segment: the `Count` acts beside this one.
    Counted {
        segment: u8,
        times: u32,
        generation: i64,
        changes: u64,
    },
    /// No deferred job with an earlier `run_at` than `floor` is left, but for those noted since.
    Promote {
        floor: i64,
        generation: u64,
    },
    /// Somebody else wrote to a leaf.
    Foreign,
}

impl Act {
    /// Whether the act looks at what the others of its transaction left: it is settled after
    /// them, also after those that a rebuild made doubts of.
    pub fn is_farewell(self) -> bool {
        matches!(self, Self::Deregister { .. })
    }

    /// Whether PREPARE TRANSACTION may leave the act to its doubt. A claim's items would be open
    /// to nobody; runtimes are a session's; maintenance holds what a replay needs.
    pub fn may_be_prepared(self) -> bool {
        !matches!(
            self,
            Self::Claim { .. }
                | Self::Register { .. }
                | Self::Deregister { .. }
                | Self::Rotate { .. }
                | Self::List { .. }
                | Self::Count { .. }
                | Self::Counted { .. }
                | Self::Truncate { .. }
                | Self::Promote { .. }
        )
    }

    /// Whether replay restores what the act did from the rows that its transaction wrote.
    /// Other acts speak of what survives a rebuild.
    pub fn is_rebuilt(self) -> bool {
        matches!(
            self,
            Self::Enqueue { .. }
                | Self::Claim { .. }
                | Self::Close { .. }
                | Self::Release { .. }
                | Self::Withdraw { .. }
                | Self::Defer { .. }
        )
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub db: u16,
    /// Of the database's memory when the act happened.
    pub generation: u64,
    pub subxact: u32,
    pub act: Act,
}

#[derive(Default)]
pub struct UndoLog {
    entries: Vec<Entry>,
}

impl UndoLog {
    pub const fn new() -> Self {
        Self { entries: Vec::new() }
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Makes room for `count` more entries; false when memory is short.
    pub fn reserve(&mut self, count: usize) -> bool {
        self.entries.try_reserve(count).is_ok()
    }

    /// Room must have been reserved. Returns the index, for `decide`.
    pub fn push(&mut self, entry: Entry) -> usize {
        self.entries.push(entry);
        self.entries.len() - 1
    }

    /// Fills in how a taken item ends.
    pub fn decide(&mut self, index: usize, how: End) {
        if let Some(Entry { act: Act::Close { end, .. }, .. }) = self.entries.get_mut(index) {
            *end = how;
        }
    }

    /// What this transaction makes of an attempt that it has taken: its mark, or None where it
    /// ends it.
    ///
    /// * `mark` - as it is for others
    /// * `last` - no entry after this one is about it
    pub fn kept(&self, db: u16, receipt: i64, mark: Mark, last: u32) -> Option<Mark> {
        let upto = self.entries.len().min((last as usize).saturating_add(1));
        let ends = self.entries.iter().take(upto).rev().filter_map(|entry| match entry.act {
            Act::Close { receipt: of, end, .. } if entry.db == db && of == receipt => Some(end),
            _ => None,
        });
        for end in ends {
            match end {
                End::Open => {}
                End::Kept(mark) => return Some(mark),
                _ => return None,
            }
        }
        Some(mark)
    }

    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// A subtransaction committed: its acts are its parent's now.
    pub fn relabel(&mut self, subxact: u32, parent: u32) {
        for entry in self.entries.iter_mut().rev() {
            if entry.subxact < subxact {
                break;
            }
            entry.subxact = parent;
        }
    }

    /// The last act of the subtransaction or of one inside it, taken off the log.
    pub fn pop_from(&mut self, subxact: u32) -> Option<Entry> {
        if self.entries.last()?.subxact < subxact { None } else { self.entries.pop() }
    }

    pub fn pop(&mut self) -> Option<Entry> {
        self.entries.pop()
    }

    /// The end of the transaction: the log is empty, its memory is kept for the next
    /// one unless a huge transaction blew it up.
    pub fn clear(&mut self) {
        self.entries.clear();
        if self.entries.capacity() > 65_536 {
            self.entries = Vec::new();
        }
    }
}
