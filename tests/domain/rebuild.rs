//! Replay: memory is filled from the truth alone, transactions open or prepared meanwhile.

use std::collections::BTreeMap;

use crate::domain::bits::Bits;
use crate::domain::dispatcher::*;
use crate::domain::entities::*;
use crate::domain::undo::{Act, End, Entry};
use crate::truth::*;
use crate::world::{DB, Prepared, World};

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

    /// Nobody is quiesced: what open transactions did comes back as doubts.
    pub fn rebuild(&mut self) {
        let released = self.released();
        let prepared: usize = self.prepared.iter().map(|p| p.entries.len()).sum();
        let open: usize = self.open.iter().map(|t| t.log.len()).sum();
        let is_release = |e: &&Entry| matches!(e.act, Act::Close { end: End::Released(_), .. });
        let splits: usize =
            self.open.iter().map(|t| t.log.entries().iter().filter(is_release).count()).sum();
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
        if released.len() + self.truth.pending.len() + splits + held > sizes.releases
            || prepared + open + splits > sizes.doubts
        {
            return;
        }
        *self.seen.entry("rebuild").or_default() += 1;
        if self.open.iter().any(|t| t.has(|act| matches!(act, Act::Claim { .. }))) {
            self.saw("rebuild under an open claim");
        }
        self.see_life_under_rebuild();
        self.leave_open();
        let block = self.block();
        let names = self.names();
        let (segments, current) = (self.truth.segments, self.truth.current);
        self.memory.dispatcher().begin_rebuild(DB, block, &segments, current);
        self.restore_jobs(&released);
        let owners = self.memory.dispatcher().runtimes.indexes().count();
        assert!(owners <= sizes.runtimes);
        self.restore_claims();
        self.restore_prepared(&names);
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

    fn see_life_under_rebuild(&mut self) {
        let withdrawal = |act: Act| matches!(act, Act::Withdraw { .. });
        let request = |act: Act| matches!(act, Act::Close { end: End::Kept(_), .. });
        let acts = |p: &Prepared| p.entries.iter().map(|e| e.act).collect::<Vec<_>>();
        let prepared: Vec<Act> = self.prepared.iter().flat_map(acts).collect();
        if self.open.iter().any(|t| t.has(withdrawal)) {
            self.saw("rebuild under an open withdrawal");
        }
        if prepared.iter().any(|act| withdrawal(*act)) {
            self.saw("rebuild under a prepared withdrawal");
        }
        if self.open.iter().any(|t| t.has(request)) {
            self.saw("rebuild under an open mark");
        }
        if prepared.iter().any(|act| request(*act)) {
            self.saw("rebuild under a prepared mark");
        }
    }

    /// An item that was taken and left open has no row: nobody holds it after a rebuild.
    fn leave_open(&mut self) {
        let is_left = |e: &Entry| matches!(e.act, Act::Close { end: End::Open, .. });
        let mut left = Vec::new();
        for transaction in &mut self.prepared {
            left.extend(transaction.entries.extract_if(.., |e| is_left(e)));
        }
        for tx in &mut self.open {
            let entries = tx.log.entries().to_vec();
            tx.log.clear();
            for entry in entries {
                if is_left(&entry) {
                    left.push(entry);
                } else {
                    tx.log.push(entry);
                }
            }
        }
        for entry in left {
            let Act::Close { receipt, .. } = entry.act else { continue };
            let job = self.truth.job(receipt).unwrap();
            assert!(job.closing.is_some());
            job.holds -= 1;
            if job.holds == 0 {
                job.closing = None;
            }
            let segment = usize::from(job.segment);
            self.truth.in_flight[segment] -= 1;
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
            let (mut ready, mut live, mut touched) = (Bits::default(), 0, row.touched);
            for (offset, job) in self.truth.jobs_in(number) {
                live += 1;
                touched |= job.state.receipt().is_some();
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
                untouched: !touched,
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
                State::Running { .. } | State::Popped { .. } => {}
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
            let xid = match self.truth.jobs[&row.items[0].1].state {
                State::Popped { xid, .. } => Some(xid),
                _ => None,
            };
            // Some items of a committed claim were closed before.
            let closed = if xid.is_some() { 0 } else { 3 };
            let place = (row.segment, first, row.items.len() as u32 + closed);
            let claim = d.restore_claim(DB, &name, place, row.runtime, 0, xid).unwrap();
            for (receipt, position) in row.items {
                let job = self.truth.jobs.get_mut(&position).unwrap();
                job.described = false;
                job.aside = 0;
                let deadline = (job.deadline, job.period);
                d.restore_item(claim, (receipt, position), job.prior, deadline, job.closing)
                    .unwrap();
                if job.mark != Mark::default() {
                    d.restore_mark(DB, receipt, job.mark, self.now);
                }
            }
        }
    }

    /// Acts of prepared transactions name what is in memory now.
    fn restore_prepared(&mut self, names: &BTreeMap<u32, u8>) {
        let mut prepared = core::mem::take(&mut self.prepared);
        let pending = core::mem::take(&mut self.truth.pending);
        self.restore_open(names, &pending);
        for transaction in &mut prepared {
            let mut releases: BTreeMap<u32, u32> = BTreeMap::new();
            for entry in &transaction.entries {
                if let Act::Release { release } = entry.act {
                    let (new, details) =
                        self.restore_pending(&transaction.entries, release, &pending[&release]);
                    releases.insert(release, new);
                    self.truth.pending.insert(new, details);
                }
            }
            let xid = transaction.xids[0];
            for entry in &mut transaction.entries {
                if !entry.act.is_rebuilt() {
                    // Its doubt stayed.
                    continue;
                }
                let mut d = self.memory.dispatcher();
                let queue_of = |d: &mut Dispatcher<'_>, at: u32| {
                    d.ensure_queue(DB, &queue_name(names[&at])).unwrap()
                };
                entry.act = match entry.act {
                    Act::Release { release } => Act::Release { release: releases[&release] },
                    Act::Withdraw { position, cancelled, .. } => {
                        let held = d.restore_withdrawn(DB, position, xid).unwrap();
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
        entries: &[Entry],
        release: u32,
        details: &Pending,
    ) -> (u32, Pending) {
        let mut bits = Bits::default();
        let mut chunk = 0;
        for Entry { act, .. } in entries {
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

    /// Replay meets the rows of open transactions, and knows them by their xmin: that of any
    /// of the subtransactions which committed into the one that the log names.
    fn restore_open(&mut self, names: &BTreeMap<u32, u8>, pending: &BTreeMap<u32, Pending>) {
        let mut open = core::mem::take(&mut self.open);
        for tx in &mut open {
            let entries = tx.log.entries().to_vec();
            tx.log.clear();
            tx.release = None;
            // Closes of one subtransaction share a release; the log of the truth says so too.
            let mut releases: BTreeMap<(u32, u32), u32> = BTreeMap::new();
            for mut entry in entries.iter().copied() {
                let sub = tx.subs.iter().find(|s| s.id == entry.subxact).unwrap();
                let mut xid = sub.xids[self.dice.below(sub.xids.len())];
                let act = match entry.act {
                    Act::Enqueue { .. } => Some(entry.act),
                    Act::Defer { queue, retryable, count, due } => {
                        let mut d = self.memory.dispatcher();
                        let queue = d.ensure_queue(DB, &queue_name(names[&queue])).unwrap();
                        Some(Act::Defer { queue, retryable, count, due })
                    }
                    Act::Claim { first, .. } => {
                        let claim = self.memory.dispatcher().claim_by_first(DB, first).unwrap();
                        Some(Act::Claim { claim, first })
                    }
                    Act::Withdraw { position, cancelled, .. } => {
                        let mut d = self.memory.dispatcher();
                        let held = d.restore_withdrawn(DB, position, tx.xid).unwrap();
                        Some(Act::Withdraw { release: held.unwrap(), position, cancelled })
                    }
                    // Made again with the first close that needs it.
                    Act::Release { .. } => continue,
                    Act::Close { receipt, end, .. } => {
                        let mut end = end;
                        if let End::Released(old) = end {
                            xid = sub.xids[0];
                            let key = (old, entry.subxact);
                            let known = releases.get(&key).copied();
                            let release = known.unwrap_or_else(|| {
                                let joint: Vec<Entry> = entries
                                    .iter()
                                    .copied()
                                    .filter(|e| e.subxact == entry.subxact)
                                    .collect();
                                let (new, details) =
                                    self.restore_pending(&joint, old, &pending[&old]);
                                self.truth.pending.insert(new, details);
                                let act = Act::Release { release: new };
                                let doubt = Doubt { db: DB, xid, order: 0, act };
                                self.memory.dispatcher().restore_doubt(doubt).unwrap();
                                tx.log.push(Entry { act, ..entry });
                                new
                            });
                            releases.insert(key, release);
                            end = End::Released(release);
                        }
                        let item = self.memory.dispatcher().item(DB, receipt).unwrap();
                        Some(Act::Close { item, receipt, end })
                    }
                    _ => None,
                };
                if let Some(act) = act {
                    if matches!(act, Act::Close { .. } | Act::Claim { .. }) {
                        entry.act = act;
                    }
                    let doubt = Doubt { db: DB, xid, order: 0, act };
                    self.memory.dispatcher().restore_doubt(doubt).unwrap();
                }
                tx.log.push(entry);
            }
        }
        self.open = open;
    }
}
