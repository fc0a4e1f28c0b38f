//! What the tables would say: a naive model of jobs and of the acts of transactions.

use std::collections::{BTreeMap, BTreeSet};

use crate::domain::bits::CHUNK_SIZE;
use crate::domain::dispatcher::OPEN_ASIDE;
use crate::domain::entities::*;
use crate::domain::undo::{Act, End, Entry};

pub const QUEUES: usize = 5;

/// Queue, priority, shard.
pub type Key = (u8, u8, u8);

pub fn queue_name(queue: u8) -> String {
    format!("q{queue}")
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In its chunk, warm or cold.
    Fresh,
    /// Given back, at the front of its lane.
    Front,
    /// Released and due.
    Tail,
    Timed {
        due: i64,
        snoozed: bool,
    },
    /// Given back too often.
    Delayed {
        due: i64,
    },
    Popped {
        xid: u32,
        receipt: i64,
    },
    Running {
        receipt: i64,
    },
}

impl State {
    pub fn is_ready(self) -> bool {
        matches!(self, Self::Fresh | Self::Front | Self::Tail)
    }

    pub fn receipt(self) -> Option<i64> {
        match self {
            Self::Popped { receipt, .. } | Self::Running { receipt } => Some(receipt),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub key: Key,
    pub segment: u8,
    /// Attempts used, or AS_BODY.
    pub prior: i16,
    /// What memory believes: a give-back without a timer forgets it.
    pub believed: i16,
    /// The body was read since the last claim.
    pub described: bool,
    pub rollbacks: u8,
    pub state: State,
    pub closing: Option<u32>,
    /// Acts of that transaction on it.
    pub holds: u32,
    /// What is written about its attempt.
    pub mark: Mark,
    /// Its deadline as it was claimed, from then on.
    pub period: i64,
    /// By the transaction that withdrew it from where `state` says it waits.
    pub held: Option<u32>,
    pub deadline: i64,
    /// No rescue looks at it before.
    pub aside: i64,
    pub claim: i64,
}

/// Attempts that the body of a job says.
pub fn body_prior(position: i64) -> i16 {
    (position % 3) as i16
}

#[derive(Clone, Debug)]
pub struct ClaimRow {
    pub key: Key,
    pub segment: u8,
    pub runtime: Option<[u8; 16]>,
    pub items: Vec<(i64, i64)>,
}

#[derive(Clone, Copy, Debug)]
pub struct ChunkRow {
    pub key: Key,
    pub segment: u8,
    pub allocated: u16,
    pub in_flight: u16,
    /// A committed claim named one of its jobs.
    pub touched: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Pending {
    pub prior: i16,
    pub snoozed: bool,
    pub due: i64,
}

#[derive(Default)]
pub struct Truth {
    pub jobs: BTreeMap<i64, Job>,
    /// Of open items.
    pub receipts: BTreeMap<i64, i64>,
    pub claims: BTreeMap<i64, ClaimRow>,
    pub chunks: BTreeMap<i64, ChunkRow>,
    /// Releases of open transactions.
    pub pending: BTreeMap<u32, Pending>,
    /// Totals, and deferred jobs.
    pub totals: [Counts; QUEUES],
    pub pins: [u32; QUEUES],
    pub paused: [bool; QUEUES],
    /// Durable ones.
    pub lanes: BTreeMap<Key, i64>,
    /// Lanes by the ids they were ever given.
    pub ids: BTreeMap<i64, Key>,
    pub dead: BTreeSet<[u8; 16]>,
    pub in_flight: [u32; SEGMENTS],
    pub segments: [Segment; SEGMENTS],
    pub current: u8,
}

/// The truth needs the names behind indexes that acts use.
pub struct Names<'n> {
    pub queue: &'n dyn Fn(u32) -> u8,
}

impl Truth {
    pub fn job(&mut self, receipt: i64) -> Option<&mut Job> {
        let position = self.receipts.get(&receipt)?;
        self.jobs.get_mut(position)
    }

    fn end_pin(&mut self, names: &Names<'_>, act: Act) {
        if let Act::Defer { queue, .. } | Act::Pause { queue, .. } | Act::Configure { queue } = act
        {
            self.pins[usize::from((names.queue)(queue))] -= 1;
        }
    }

    /// A transaction committed.
    pub fn commit(&mut self, entries: &[Entry], names: &Names<'_>, now: i64) {
        for entry in entries.iter().filter(|e| !e.act.is_farewell()) {
            self.commit_act(entry.act, names, now);
        }
        for entry in entries.iter().filter(|e| e.act.is_farewell()) {
            self.commit_act(entry.act, names, now);
        }
        for entry in entries {
            if let Act::Release { release } = entry.act {
                self.pending.remove(&release);
            }
        }
    }

    fn commit_act(&mut self, act: Act, names: &Names<'_>, now: i64) {
        self.end_pin(names, act);
        match act {
            Act::Enqueue { chunk, first, count } => {
                let row = self.chunks.get_mut(&chunk).unwrap();
                row.in_flight -= count;
                let (key, segment) = (row.key, row.segment);
                self.in_flight[usize::from(segment)] -= 1;
                for offset in first..first + count {
                    let job = Job {
                        key,
                        segment,
                        prior: AS_BODY,
                        believed: AS_BODY,
                        described: false,
                        rollbacks: 0,
                        state: State::Fresh,
                        closing: None,
                        holds: 0,
                        mark: Mark::default(),
                        period: i64::MAX,
                        held: None,
                        deadline: i64::MAX,
                        aside: 0,
                        claim: 0,
                    };
                    assert!(self.jobs.insert(position(chunk, offset), job).is_none());
                }
            }
            Act::Claim { first, .. } => {
                let row = self.claims[&first].clone();
                self.in_flight[usize::from(row.segment)] -= 1;
                for (receipt, position) in row.items {
                    self.chunks.get_mut(&split(position).0).unwrap().touched = true;
                    self.jobs.get_mut(&position).unwrap().state = State::Running { receipt };
                }
            }
            Act::Close { receipt, end, .. } => self.commit_close(receipt, end, now),
            Act::Withdraw { position, cancelled, .. } => {
                let job = self.jobs.remove(&position).unwrap();
                assert!(job.held.is_some());
                self.in_flight[usize::from(job.segment)] -= 1;
                let totals = &mut self.totals[usize::from(job.key.0)];
                totals.cancelled += i64::from(cancelled);
            }
            Act::Lane { lane: _, id } => {
                let key = self.ids[&id];
                let known = self.lanes.entry(key).or_insert(id);
                assert_eq!(*known, id, "two ids of one lane");
            }
            Act::Defer { queue, retryable, count, .. } => {
                let totals = &mut self.totals[usize::from((names.queue)(queue))];
                *(if retryable { &mut totals.retryable } else { &mut totals.scheduled }) +=
                    i64::from(count);
            }
            Act::Pause { queue, paused } => {
                self.paused[usize::from((names.queue)(queue))] = paused;
            }
            Act::Deregister { id, .. } if self.dead.contains(&id) => {}
            Act::Deregister { id, .. } => {
                // What has a deadline goes on without it.
                let jobs = &self.jobs;
                for row in self.claims.values_mut().filter(|row| row.runtime == Some(id)) {
                    let ends = |(_, position): &(i64, i64)| {
                        jobs[position].deadline != i64::MAX || jobs[position].mark.is_parked()
                    };
                    if row.items.iter().all(ends) {
                        row.runtime = None;
                    }
                }
                self.dead.insert(id);
            }
            Act::Rotate { segment, .. } => {
                self.segments[usize::from(self.current)].state = SegmentState::Sealed;
                self.segments[usize::from(segment)].state = SegmentState::Current;
                self.current = segment;
            }
            Act::Truncate { segment, generation } => {
                let entry = &mut self.segments[usize::from(segment)];
                entry.state = SegmentState::Free;
                entry.generation = generation;
            }
            _ => {}
        }
    }

    fn commit_close(&mut self, receipt: i64, end: End, now: i64) {
        let position = self.receipts[&receipt];
        let job = self.jobs.get_mut(&position).unwrap();
        assert!(matches!(job.state, State::Running { .. }) && job.closing.is_some());
        self.in_flight[usize::from(job.segment)] -= 1;
        job.holds -= 1;
        if job.holds == 0 {
            job.closing = None;
        }
        match end {
            End::Open => {
                job.aside = now + OPEN_ASIDE;
                return;
            }
            End::Kept(mark) => return self.keep(position, mark, now),
            _ => assert!(job.closing.is_none()),
        }
        job.mark = Mark::default();
        self.receipts.remove(&receipt);
        let totals = &mut self.totals[usize::from(job.key.0)];
        let row = self.claims.get_mut(&job.claim).unwrap();
        row.items.retain(|i| i.0 != receipt);
        if row.items.is_empty() {
            self.claims.remove(&job.claim);
        }
        match end {
            End::Completed => totals.completed += 1,
            End::Failed => totals.failed += 1,
            End::Cancelled => totals.cancelled += 1,
            End::Moved => {}
            End::Released(release) => {
                let Pending { prior, snoozed, due } = self.pending[&release];
                job.prior = prior;
                job.believed = prior;
                job.rollbacks = 0;
                job.state = if due <= now { State::Tail } else { State::Timed { due, snoozed } };
                return;
            }
            End::Open | End::Kept(_) | End::Undecided => unreachable!(),
        }
        self.jobs.remove(&position);
    }

    fn keep(&mut self, position: i64, mark: Mark, now: i64) {
        let job = self.jobs.get_mut(&position).unwrap();
        let resumed = job.mark.is_parked() && !mark.is_parked();
        let returns = job.mark.care != Care::Claimer && mark.care == Care::Claimer;
        job.mark = mark;
        let owner = self.claims[&job.claim].runtime;
        if returns && owner.is_none_or(|id| self.dead.contains(&id)) {
            job.mark.care = Care::Lease;
        }
        let endless = job.mark.care == Care::Lease && job.deadline == i64::MAX;
        if resumed || endless {
            job.deadline = match job.period {
                i64::MAX if job.mark.care == Care::Claimer => i64::MAX,
                i64::MAX => now + QueueSettings::default().attempt_deadline,
                period => now + period,
            };
        }
        self.let_go();
    }

    /// Claims of dead runtimes that are in nobody's care keep no place there.
    pub fn let_go(&mut self) {
        let (jobs, dead) = (&self.jobs, &self.dead);
        for row in self.claims.values_mut() {
            let free = |(_, position): &(i64, i64)| {
                let job = &jobs[position];
                job.mark.care != Care::Claimer && matches!(job.state, State::Running { .. })
            };
            if row.runtime.is_some_and(|id| dead.contains(&id)) && row.items.iter().all(free) {
                row.runtime = None;
            }
        }
    }

    /// An act was rolled back. `in_chunk`: whether memory gave the job back to its chunk.
    pub fn abort(&mut self, act: Act, names: &Names<'_>, now: i64, in_chunk: &dyn Fn(i64) -> bool) {
        self.end_pin(names, act);
        match act {
            Act::Enqueue { chunk, count, .. } => {
                let row = self.chunks.get_mut(&chunk).unwrap();
                row.in_flight -= count;
                self.in_flight[usize::from(row.segment)] -= 1;
            }
            Act::Claim { first, .. } => {
                let row = self.claims.remove(&first).unwrap();
                self.in_flight[usize::from(row.segment)] -= 1;
                for (receipt, position) in row.items {
                    self.receipts.remove(&receipt);
                    let job = self.jobs.get_mut(&position).unwrap();
                    assert!(matches!(job.state, State::Popped { .. }) && job.closing.is_none());
                    job.deadline = i64::MAX;
                    job.rollbacks += 1;
                    if in_chunk(position) {
                        job.rollbacks = 0;
                        job.believed = AS_BODY;
                        job.state = State::Fresh;
                    } else if job.rollbacks < 3 {
                        job.state = State::Front;
                    } else {
                        let wait = (1_000_000_i64 << (job.rollbacks - 3).min(6)).min(60_000_000);
                        job.state = State::Delayed { due: now + wait };
                    }
                }
            }
            Act::Close { receipt, .. } => {
                let job = self.job(receipt).unwrap();
                job.holds -= 1;
                if job.holds == 0 {
                    job.closing = None;
                }
                let segment = usize::from(job.segment);
                self.in_flight[segment] -= 1;
            }
            Act::Withdraw { position, .. } => {
                let job = self.jobs.get_mut(&position).unwrap();
                assert!(job.held.take().is_some());
                self.in_flight[usize::from(job.segment)] -= 1;
            }
            Act::Release { release } => {
                self.pending.remove(&release);
            }
            Act::Register { id, .. } => {
                self.dead.insert(id);
            }
            _ => {}
        }
    }

    /// Time passed and memory was told.
    pub fn return_due(&mut self, now: i64) {
        let due_by = now.div_euclid(1000) * 1000;
        for job in self.jobs.values_mut().filter(|job| job.held.is_none()) {
            if let State::Timed { due, .. } | State::Delayed { due } = job.state
                && due <= due_by
            {
                job.state = State::Tail;
            }
        }
    }

    pub fn counts(&self) -> [Counts; QUEUES] {
        let mut counts = self.totals;
        for job in self.jobs.values() {
            let entry = &mut counts[usize::from(job.key.0)];
            match job.state {
                State::Timed { snoozed: true, .. } => entry.scheduled += 1,
                State::Timed { snoozed: false, .. } => entry.retryable += 1,
                State::Running { .. } if job.mark.is_parked() => entry.waiting_external += 1,
                State::Running { .. } => entry.running += 1,
                _ => entry.available += 1,
            }
        }
        counts
    }

    /// Committed jobs of a chunk.
    pub fn jobs_in(&self, chunk: i64) -> impl Iterator<Item = (u16, &Job)> {
        self.jobs
            .range(position(chunk, 0)..=position(chunk, CHUNK_SIZE as u16 - 1))
            .map(|(position, job)| (split(*position).1, job))
    }
}
