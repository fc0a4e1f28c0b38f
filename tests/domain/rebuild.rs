//! Replay: memory is filled from the truth alone, transactions open or prepared meanwhile.

use std::collections::BTreeMap;

use crate::domain::bits::Bits;
use crate::domain::dispatcher::*;
use crate::domain::entities::*;
use crate::domain::undo::{Act, End, Entry};
use crate::truth::*;
use crate::world::{DB, World};

type Released = BTreeMap<(i64, i16, bool, i64), Bits>;

impl World {
    /// What waits with attempts of its own, as its closure rows say.
    fn released(&self) -> Released {
        let mut released = Released::new();
        for (position, job) in &self.truth.jobs {
            let (snoozed, due) = match job.state {
                State::Timed { due, snoozed } => (snoozed, due),
                State::Popped { .. } | State::Running { .. } => continue,
                _ if job.prior == AS_BODY => continue,
                _ => (false, 0),
            };
            let (chunk, offset) = split(*position);
            released.entry((chunk, job.prior, snoozed, due)).or_default().insert(offset);
        }
        released
    }

    /// Claims and closes are quiesced first; producers are not.
    pub fn rebuild(&mut self) {
        let quiet = |act| {
            let quiesced = matches!(
                act,
                Act::Claim { .. } | Act::Close { .. } | Act::Release { .. } | Act::Withdraw { .. }
            );
            !quiesced
        };
        if !self.open.iter().all(|t| t.log.entries().iter().all(|e| quiet(e.act))) {
            return;
        }
        let released = self.released();
        let prepared: usize = self.prepared.iter().map(|p| p.entries.len()).sum();
        let open: usize = self.open.iter().map(|t| t.log.len()).sum();
        let sizes = self.settings.sizes;
        // A pool of few pages may have gone to other lanes than replay comes to first.
        let needed = |(number, row): (&i64, &ChunkRow)| {
            row.in_flight > 0 || self.truth.jobs_in(*number).next().is_some()
        };
        let chunks = self.truth.chunks.iter().filter(|c| needed(*c)).count();
        if chunks > sizes.chunks && sizes.pages < 32 {
            return;
        }
        let held = self.truth.jobs.values().filter(|job| job.held.is_some()).count();
        if released.len() + self.truth.pending.len() + held > sizes.releases
            || prepared + open > sizes.doubts
        {
            return;
        }
        *self.seen.entry("rebuild").or_default() += 1;
        let block = self.block();
        let names = self.names();
        let (segments, current) = (self.truth.segments, self.truth.current);
        self.memory.dispatcher().begin_rebuild(DB, block, &segments, current);
        self.restore_jobs(&released);
        let owners = self.memory.dispatcher().runtimes.indexes().count();
        assert!(owners <= sizes.runtimes);
        self.restore_claims();
        self.restore_prepared(&names);
        self.restore_open(&names);
        let mut d = self.memory.dispatcher();
        for number in 0..QUEUES as u8 {
            let totals = self.truth.totals[usize::from(number)];
            if totals != Counts::default() {
                d.restore_counts(DB, &queue_name(number), &totals).unwrap();
            }
        }
        let first = self.last_receipt + 100;
        d.finish_replay(DB, (first, first + self.settings.receipts), i64::MAX);
        for at in d.queues.indexes().collect::<Vec<_>>() {
            let number: usize = d.queues[at].name()[1..].parse().unwrap();
            d.queues[at].paused = self.truth.paused[number];
            d.queues[at].loaded = true;
        }
    }

    fn lane_id(&self, key: Key) -> (i64, bool) {
        match self.truth.lanes.get(&key) {
            Some(id) => (*id, true),
            None => {
                // Rows of an open transaction name it.
                let ids = self.truth.ids.iter().filter(|(_, k)| **k == key);
                (*ids.map(|(id, _)| id).max().unwrap(), false)
            }
        }
    }

    fn restore_jobs(&mut self, released: &Released) {
        let now = self.now;
        for (number, row) in self.truth.chunks.clone() {
            let (mut ready, mut live) = (Bits::default(), 0);
            for (offset, job) in self.truth.jobs_in(number) {
                live += 1;
                let timed = matches!(job.state, State::Timed { .. });
                if job.prior == AS_BODY && job.state.receipt().is_none() && !timed {
                    ready.insert(offset);
                }
            }
            if live == 0 && row.in_flight == 0 {
                continue;
            }
            let chunk = Restored {
                number,
                segment: row.segment,
                born: now,
                ready,
                live,
                in_flight: row.in_flight,
                untouched: !row.touched,
            };
            let queue = queue_name(row.key.0);
            let (id, durable) = self.lane_id(row.key);
            let name =
                LaneName { queue: &queue, priority: row.key.1, shard: row.key.2, id, durable };
            let mut d = self.memory.dispatcher();
            d.restore_chunk(DB, &name, &chunk).unwrap();
        }
        for ((chunk, prior, snoozed, due), bits) in released {
            let row = self.truth.chunks[chunk];
            let queue = queue_name(row.key.0);
            let (id, durable) = self.lane_id(row.key);
            let name =
                LaneName { queue: &queue, priority: row.key.1, shard: row.key.2, id, durable };
            let mut d = self.memory.dispatcher();
            d.restore_release(DB, &name, (*chunk, bits), *prior, *snoozed, *due, now).unwrap();
        }
        for job in self.truth.jobs.values_mut() {
            job.believed = job.prior;
            match job.state {
                State::Timed { due, .. } if due > now => {}
                State::Running { .. } => {}
                _ => {
                    job.state = if job.prior == AS_BODY { State::Fresh } else { State::Tail };
                }
            }
            job.rollbacks = 0;
        }
    }

    fn restore_claims(&mut self) {
        for (first, row) in self.truth.claims.clone() {
            let queue = queue_name(row.key.0);
            let (id, durable) = self.lane_id(row.key);
            let name =
                LaneName { queue: &queue, priority: row.key.1, shard: row.key.2, id, durable };
            let mut d = self.memory.dispatcher();
            let count = row.items.len() as u32 + 3;
            let claim =
                d.restore_claim(DB, &name, (row.segment, first, count), row.runtime, 0).unwrap();
            for (receipt, position) in row.items {
                let job = self.truth.jobs.get_mut(&position).unwrap();
                job.described = false;
                d.restore_item(claim, (receipt, position), job.prior, job.deadline, job.closing)
                    .unwrap();
            }
        }
    }

    /// Acts of prepared transactions name what is in memory now.
    fn restore_prepared(&mut self, names: &BTreeMap<u32, u8>) {
        let mut prepared = core::mem::take(&mut self.prepared);
        let pending = core::mem::take(&mut self.truth.pending);
        for transaction in &mut prepared {
            let mut releases: BTreeMap<u32, u32> = BTreeMap::new();
            for entry in &transaction.entries {
                if let Act::Release { release } = entry.act {
                    let (new, details) =
                        self.restore_pending(transaction, release, &pending[&release]);
                    releases.insert(release, new);
                    self.truth.pending.insert(new, details);
                }
            }
            let xid = transaction.xids[0];
            for entry in &mut transaction.entries {
                let mut d = self.memory.dispatcher();
                let queue_of = |d: &mut Dispatcher<'_>, at: u32| {
                    d.ensure_queue(DB, &queue_name(names[&at])).unwrap()
                };
                entry.act = match entry.act {
                    Act::Release { release } => Act::Release { release: releases[&release] },
                    Act::Withdraw { position, cancelled, .. } => {
                        let held = d.restore_withdrawn(DB, position, xid).unwrap();
                        self.truth.jobs.get_mut(&position).unwrap().held = Some(xid);
                        Act::Withdraw { release: held.unwrap(), position, cancelled }
                    }
                    Act::Close { receipt, end, .. } => {
                        let end = match end {
                            End::Released(release) => End::Released(releases[&release]),
                            other => other,
                        };
                        Act::Close { item: d.item(DB, receipt).unwrap(), receipt, end }
                    }
                    Act::Defer { queue, retryable, count, due } => {
                        Act::Defer { queue: queue_of(&mut d, queue), retryable, count, due }
                    }
                    Act::Pause { queue, paused } => {
                        Act::Pause { queue: queue_of(&mut d, queue), paused }
                    }
                    Act::Configure { queue } => Act::Configure { queue: queue_of(&mut d, queue) },
                    other => other,
                };
                entry.generation = d.base(DB).generation;
                d.restore_doubt(Doubt { db: DB, xid, order: 0, act: entry.act }).unwrap();
            }
        }
        self.prepared = prepared;
    }

    fn restore_pending(
        &mut self,
        transaction: &crate::world::Prepared,
        release: u32,
        details: &Pending,
    ) -> (u32, Pending) {
        let mut bits = Bits::default();
        let mut chunk = 0;
        for Entry { act, .. } in &transaction.entries {
            if let Act::Close { receipt, end: End::Released(of), .. } = act
                && *of == release
            {
                let (number, offset) = split(self.truth.receipts[receipt]);
                chunk = number;
                bits.insert(offset);
            }
        }
        let mut d = self.memory.dispatcher();
        let Pending { prior, snoozed, due } = *details;
        // All its closes may have been rolled back: any lane will do.
        let key = self.truth.chunks.get(&chunk).map_or((0, 1, 0), |row| row.key);
        let queue = queue_name(key.0);
        let (id, durable) = match self.truth.lanes.get(&key) {
            Some(id) => (*id, true),
            None => (1, false),
        };
        let name = LaneName { queue: &queue, priority: key.1, shard: key.2, id, durable };
        let new =
            d.restore_pending_release(DB, &name, (chunk, &bits), prior, snoozed, due).unwrap();
        (new, *details)
    }

    /// Replay meets the rows of open transactions, and knows them by their xmin.
    fn restore_open(&mut self, names: &BTreeMap<u32, u8>) {
        let mut d = self.memory.dispatcher();
        for tx in &self.open {
            for Entry { act, subxact, .. } in tx.log.entries() {
                let act = &match *act {
                    Act::Enqueue { .. } => *act,
                    Act::Defer { queue, retryable, count, due } => {
                        let queue = d.ensure_queue(DB, &queue_name(names[&queue])).unwrap();
                        Act::Defer { queue, retryable, count, due }
                    }
                    _ => continue,
                };
                {
                    let sub = tx.subs.iter().find(|s| s.id == *subxact).unwrap();
                    let doubt = Doubt { db: DB, xid: sub.xids[0], order: 0, act: *act };
                    d.restore_doubt(doubt).unwrap();
                }
            }
        }
    }
}
