//! How far one pass of a rescue goes, and what is told of the passes.

/// Why an attempt is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    Owner,
    Deadline,
    Callback,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::Owner, Self::Deadline, Self::Callback];

    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Owner => "owner",
            Self::Deadline => "deadline",
            Self::Callback => "callback",
        }
    }
}

/// Why a pass ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PassEnd {
    /// A batch came back short: nothing is left.
    Drained,
    Budget,
    MaxRows,
}

impl PassEnd {
    pub const ALL: [Self; 3] = [Self::Drained, Self::Budget, Self::MaxRows];

    pub fn name(self) -> &'static str {
        match self {
            Self::Drained => "drained",
            Self::Budget => "budget",
            Self::MaxRows => "max_rows",
        }
    }
}

/// Microseconds, but for the numbers of rows.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub batch: u64,
    /// 0: one batch an interval.
    pub budget: i64,
    /// 0: one batch an interval.
    pub max_rows: u64,
    pub interval: i64,
}

impl Limits {
    fn is_single(&self) -> bool {
        self.budget <= 0 || self.max_rows == 0
    }
}

/// How long a pass that left a backlog is followed by none, microseconds.
const REST: i64 = 1_000_000;

/// A pass that goes on, batch by batch.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    began: i64,
    pub rescued: u64,
}

impl Pass {
    pub fn begin(now: i64) -> Self {
        Self { began: now, rescued: 0 }
    }

    /// How many the next batch may take.
    pub fn batch(&self, limits: &Limits) -> u64 {
        if limits.is_single() {
            return limits.batch;
        }
        limits.batch.min(limits.max_rows.saturating_sub(self.rescued))
    }

    /// After a batch of which `found` of `asked` were there; None: the pass goes on.
    pub fn end(&self, found: u64, asked: u64, now: i64, limits: &Limits) -> Option<PassEnd> {
        if found < asked {
            Some(PassEnd::Drained)
        } else if limits.max_rows == 0 {
            Some(PassEnd::MaxRows)
        } else if now.saturating_sub(self.began) >= limits.budget {
            Some(PassEnd::Budget)
        } else if self.rescued >= limits.max_rows {
            Some(PassEnd::MaxRows)
        } else {
            None
        }
    }

    /// Until when there is no next pass, whatever happens; 0: one may begin at once.
    pub fn rest(&self, end: PassEnd, now: i64, limits: &Limits) -> i64 {
        if limits.is_single() && self.rescued > 0 {
            now.saturating_add(limits.interval)
        } else if end == PassEnd::Drained {
            0
        } else {
            now.saturating_add(REST)
        }
    }
}

/// Bounds of the buckets of pass sizes.
pub const BOUNDS: [u64; 6] = [1, 10, 100, 1_000, 10_000, 100_000];

/// A histogram of pass sizes.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Sizes {
    /// Passes of at most the bound's size, and above the bound before.
    pub buckets: [u64; BOUNDS.len()],
    pub count: u64,
    pub sum: u64,
}

impl Sizes {
    pub fn add(&mut self, size: u64) {
        if let Some(bucket) = BOUNDS.iter().position(|bound| size <= *bound) {
            self.buckets[bucket] += 1;
        }
        self.count += 1;
        self.sum += size;
    }
}

/// What a database's memory keeps of one kind.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Passes {
    /// See `Pass::rest`.
    pub rest: i64,
    /// By `PassEnd`.
    pub sizes: [Sizes; PassEnd::ALL.len()],
}
