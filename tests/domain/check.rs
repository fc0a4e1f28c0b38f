//! Compares memory with the truth, and memory with itself.

use crate::domain::bits::Bits;
use crate::domain::dispatcher::Dispatcher;
use crate::domain::entities::*;
use crate::domain::table::NIL;
use crate::domain::undo::Act;
use crate::truth::{Key, QUEUES, State, Truth, body_prior, queue_name};

fn key_of(d: &Dispatcher<'_>, lane: u32) -> Key {
    let Lane { queue, priority, shard, .. } = d.lanes[lane];
    let number = d.queues[queue].name()[1..].parse().unwrap();
    (number, priority, shard)
}

/// Where memory has a job.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Place {
    Chunk,
    Cold,
    Front(i16, u8),
    Tail(i16, u8),
    Timed(i16, bool, i64),
    Delayed(i16, u8, i64),
    Held(u32, i16, u8),
    Item {
        receipt: i64,
        committed: bool,
        closer: u32,
        holds: u32,
        mark: Mark,
        prior: i16,
        rollbacks: u8,
        deadline: i64,
    },
}

pub struct Check<'c, 'd> {
    pub d: &'c Dispatcher<'d>,
    pub truth: &'c Truth,
    /// When the deadline pass ran last, and its repeat time.
    pub swept: i64,
    pub again: i64,
    /// When the pass for callbacks ran last.
    pub swept_callbacks: i64,
}

impl Check<'_, '_> {
    pub fn run(&self) {
        let mut places: Vec<(i64, Key, u8, Place)> = Vec::with_capacity(self.truth.jobs.len());
        self.lanes(&mut places);
        self.releases(&mut places);
        self.claims(&mut places);
        self.chunks();
        places.sort_unstable();
        self.membership(&places);
        self.counts();
        self.waiters();
    }

    fn lanes(&self, places: &mut Vec<(i64, Key, u8, Place)>) {
        let d = self.d;
        let mut chained = 0;
        for queue in d.queues.indexes() {
            let mut lane = d.queues[queue].lanes;
            while lane != NIL {
                assert_eq!(d.lanes[lane].queue, queue);
                chained += 1;
                lane = d.lanes[lane].next;
            }
        }
        assert_eq!(chained, d.lanes.used(), "lanes on their queues");
        let (mut linked, mut pages) = (0, 0);
        for at in d.lanes.indexes() {
            let lane = d.lanes[at];
            let key = key_of(d, at);
            let mut ready = 0;
            let (mut chunk, mut before, mut number) = (lane.head, NIL, -1);
            while chunk != NIL {
                let c = &d.chunks[chunk];
                assert!(c.linked && c.lane == at && c.prev == before && c.number > number);
                assert!(c.ready > 0 && c.bits.count() == c.ready);
                ready += u64::from(c.ready);
                for offset in c.bits.iter() {
                    places.push((position(c.number, offset), key, c.segment, Place::Chunk));
                }
                linked += 1;
                (before, number, chunk) = (chunk, c.number, c.next);
            }
            assert_eq!(lane.tail, before);
            if lane.hint != NIL {
                let hint = d.chunks.get(lane.hint).expect("hint");
                assert!(hint.linked && hint.lane == at);
            }
            if lane.open_chunk != NIL {
                let open = d.chunks.get(lane.open_chunk).expect("open chunk");
                assert!(open.lane == at && !open.is_full());
            }
            let (mut page, mut before, mut number, mut cold) = (lane.cold_head, NIL, -1, 0);
            while page != NIL {
                let p = &d.pages[page];
                assert!(p.lane == at && p.prev == before && p.count > 0);
                for slot in 0..usize::from(p.count) {
                    assert!(p.number(slot) > number);
                    number = p.number(slot);
                    assert!(d.chunk(p.db, number).is_none(), "cold and warm");
                    let row = &self.truth.chunks[&number];
                    assert!(!row.touched && row.in_flight == 0);
                    let mut bits = Bits::default();
                    for (offset, job) in self.truth.jobs_in(number) {
                        assert_eq!(job.state, State::Fresh);
                        bits.insert(offset);
                        places.push((position(number, offset), key, p.segment(slot), Place::Cold));
                    }
                    assert_eq!(bits.count(), p.ready(slot));
                    ready += u64::from(p.ready(slot));
                    cold += 1;
                }
                pages += 1;
                (before, page) = (page, p.next);
            }
            assert_eq!((lane.cold_tail, lane.cold), (before, cold));
            let (mut release, mut before) = (lane.returned, NIL);
            let mut after = i64::MIN;
            while release != NIL {
                let r = &d.releases[release];
                assert!(r.lane == at && r.state == ReleaseState::Returned && r.after >= after);
                assert!(!r.bits.is_empty() && !r.timer.is_running());
                ready += u64::from(r.bits.count());
                (before, after, release) = (release, r.after, r.next);
            }
            assert_eq!(lane.returned_tail, before);
            assert_eq!(lane.ready, ready, "ready jobs of lane {key:?}");
        }
        assert_eq!(linked, d.chunks.indexes().filter(|c| d.chunks[*c].linked).count());
        assert_eq!(pages, d.pages.used());
    }

    fn releases(&self, places: &mut Vec<(i64, Key, u8, Place)>) {
        let d = self.d;
        let mut pending = 0;
        for at in d.releases.indexes() {
            let r = d.releases[at];
            let (prior, rollbacks, due) = (r.prior, r.rollbacks, r.timer.at);
            let place = match r.state {
                ReleaseState::Pending => {
                    pending += 1;
                    assert!(self.truth.pending.contains_key(&at));
                    continue;
                }
                // The queues of the model are not serial; see `turns`.
                ReleaseState::Blocked => panic!("blocked"),
                ReleaseState::Held => Place::Held(r.holder, prior, rollbacks),
                ReleaseState::Timed if rollbacks > 0 => Place::Delayed(prior, rollbacks, due),
                ReleaseState::Timed => Place::Timed(prior, r.snoozed, due),
                ReleaseState::Returned if r.after < 0 => Place::Front(prior, rollbacks),
                ReleaseState::Returned => Place::Tail(prior, rollbacks),
            };
            assert_eq!(r.timer.is_running(), r.state == ReleaseState::Timed);
            let chunk = d.chunk(r.db, r.chunk).expect("a release's chunk is in memory");
            assert_eq!(d.chunks[chunk].lane, r.lane);
            let (key, segment) = (key_of(d, r.lane), d.chunks[chunk].segment);
            for offset in r.bits.iter() {
                places.push((position(r.chunk, offset), key, segment, place));
            }
        }
        assert_eq!(pending, self.truth.pending.len(), "pending releases");
    }

    fn claims(&self, places: &mut Vec<(i64, Key, u8, Place)>) {
        let d = self.d;
        let mut items = 0;
        for at in d.claims.indexes() {
            let claim = d.claims[at];
            let row = &self.truth.claims[&claim.first];
            let id = (claim.runtime != NIL).then(|| d.runtimes[claim.runtime].id);
            assert_eq!((row.runtime, row.segment), (id, claim.segment));
            let key = key_of(d, claim.lane);
            let (mut item, mut before, mut open, mut earliest) = (claim.items, NIL, 0, i64::MAX);
            while item != NIL {
                let i = d.items[item];
                assert!(i.claim == at && i.prev == before);
                let closer = if i.closing { i.closer } else { 0 };
                let Item { receipt, holds, mark, prior, rollbacks, deadline: due, .. } = i;
                // A parked one gets another deadline when it is resumed.
                let deadline = if mark.is_parked() { 0 } else { due };
                let committed = claim.committed;
                let place = Place::Item {
                    receipt,
                    committed,
                    closer,
                    holds,
                    mark,
                    prior,
                    rollbacks,
                    deadline,
                };
                places.push((i.position, key, claim.segment, place));
                open += 1;
                if !mark.is_parked() {
                    earliest = earliest.min(due);
                }
                let overdue = mark.until.max(self.swept_callbacks.saturating_add(self.again));
                assert_eq!(i.timer.is_running(), mark.is_parked(), "callback timer");
                assert!(!mark.is_parked() || i.timer.at <= overdue);
                let dead = claim.runtime != NIL && d.runtimes[claim.runtime].dead;
                if dead && committed && !i.closing && mark.care == Care::Claimer {
                    assert!(d.databases[usize::from(i.db)].orphans, "an orphan nobody looks for");
                }
                (before, item) = (item, i.next);
            }
            assert_eq!(open, claim.open);
            assert_eq!(open as usize, row.items.len());
            items += open;
            if earliest < i64::MAX {
                let latest = earliest.max(self.swept.saturating_add(self.again));
                assert!(claim.timer.is_running() && claim.timer.at <= latest, "deadline timer");
            }
        }
        assert_eq!(items as usize, d.items.used());
        assert_eq!(d.claims.used(), self.truth.claims.len());
        for at in d.runtimes.indexes() {
            let runtime = d.runtimes[at];
            assert_eq!(runtime.dead, self.truth.dead.contains(&runtime.id));
            let (mut claim, mut before, mut open) = (runtime.claims, NIL, 0);
            while claim != NIL {
                let c = d.claims[claim];
                assert!(c.runtime == at && c.prev == before);
                open += c.open;
                (before, claim) = (claim, c.next);
            }
            assert_eq!(runtime.open, open);
            assert!(!runtime.dead || runtime.claims != NIL, "a dead runtime without claims");
        }
    }

    fn chunks(&self) {
        let d = self.d;
        let mut live = [0; SEGMENTS];
        for at in d.chunks.indexes() {
            let c = &d.chunks[at];
            let row = &self.truth.chunks[&c.number];
            assert_eq!(key_of(d, c.lane), row.key);
            assert_eq!(c.segment, row.segment);
            assert_eq!(c.in_flight, row.in_flight, "in flight in chunk {}", c.number);
            assert_eq!(usize::from(c.live), self.truth.jobs_in(c.number).count());
            assert!(c.linked || c.ready == 0);
            assert_eq!(c.bits.count(), c.ready);
            let open = d.lanes[c.lane].open_chunk == at;
            assert!(open || c.live > 0 || c.in_flight > 0, "a chunk that nobody needs");
        }
        for lane in d.lanes.indexes() {
            let chunks = d.chunks.indexes().filter(|c| d.chunks[*c].lane == lane).count();
            assert_eq!(d.lanes[lane].chunks as usize, chunks);
        }
        for job in self.truth.jobs.values() {
            live[usize::from(job.segment)] += 1;
        }
        for (at, segment) in d.databases[0].segments.iter().enumerate() {
            assert_eq!(segment.live, live[at], "live in segment {at}");
            assert_eq!(segment.in_flight, self.truth.in_flight[at], "in flight in segment {at}");
            assert_eq!(segment.state, self.truth.segments[at].state);
            assert_eq!(segment.generation, self.truth.segments[at].generation);
        }
    }

    fn membership(&self, places: &[(i64, Key, u8, Place)]) {
        assert_eq!(places.len(), self.truth.jobs.len(), "jobs in memory");
        for ((at, key, segment, place), (position, job)) in places.iter().zip(&self.truth.jobs) {
            assert_eq!(
                (at, *key, *segment),
                (position, job.key, job.segment),
                "{place:?}, {job:?}"
            );
            let believed = job.believed;
            let prior = match job.described && believed == AS_BODY {
                true => body_prior(*position),
                false => believed,
            };
            let rollbacks = job.rollbacks;
            let item = |receipt, committed| Place::Item {
                receipt,
                committed,
                closer: job.closing.unwrap_or(0),
                holds: job.holds,
                mark: job.mark,
                prior,
                rollbacks,
                deadline: if job.mark.is_parked() { 0 } else { job.deadline },
            };
            let waiting = match job.held {
                // A give-back to a chunk forgets the roll-backs, a hold from one does not know them.
                Some(_) if job.state == State::Fresh => Some((AS_BODY, 0)),
                Some(_) => Some((believed, rollbacks)),
                None => None,
            };
            if let (Some((prior, rollbacks)), Some(xid)) = (waiting, job.held) {
                assert_eq!(*place, Place::Held(xid, prior, rollbacks), "held job {position}");
                continue;
            }
            let expected = match job.state {
                State::Fresh if *place == Place::Cold => Place::Cold,
                State::Fresh => Place::Chunk,
                State::Front => Place::Front(believed, rollbacks),
                State::Tail => Place::Tail(believed, rollbacks),
                State::Timed { due, snoozed } => Place::Timed(believed, snoozed, due),
                State::Delayed { due } => Place::Delayed(believed, rollbacks, due),
                State::Popped { receipt, .. } => item(receipt, false),
                State::Running { receipt } => item(receipt, true),
            };
            assert_eq!(*place, expected, "job {position}");
        }
    }

    fn counts(&self) {
        let counts = self.truth.counts();
        for number in 0..QUEUES as u8 {
            let (count, pins) = (counts[usize::from(number)], self.truth.pins[usize::from(number)]);
            match self.d.queue(0, &queue_name(number)) {
                Some(at) => {
                    let queue = &self.d.queues[at];
                    assert_eq!(queue.counts, count, "counts of queue {number}");
                    // What was deferred before a rebuild is in the log and in doubt, and pins twice.
                    let doubts = self.d.doubts.indexes().filter(|doubt| {
                        matches!(self.d.doubts[*doubt].act, Act::Defer { queue, .. } if queue == at)
                    });
                    let most = pins + doubts.count() as u32;
                    assert!((pins..=most).contains(&queue.pins), "pins of queue {number}");
                    assert_eq!(queue.paused, self.truth.paused[usize::from(number)]);
                }
                None => assert_eq!((count, pins), (Counts::default(), 0), "queue {number} is gone"),
            }
        }
    }

    fn waiters(&self) {
        let d = self.d;
        let (mut at, mut before, mut waiting, mut wide) = (d.waiting[0], NIL, 0, 0);
        let mut named = vec![0; d.queues.capacity()];
        while at != NIL {
            let waiter = &d.waiters[at as usize];
            assert!(waiter.waiting && waiter.prev == before);
            waiting += 1;
            wide += u32::from(waiter.is_wide());
            for queue in waiter.named() {
                named[*queue as usize] += 1;
            }
            (before, at) = (at, waiter.next);
        }
        assert_eq!(d.waiting[1], before);
        assert_eq!(waiting, d.waiters.iter().filter(|w| w.waiting).count());
        assert_eq!(d.databases[0].wide_waiters, wide);
        for queue in d.queues.indexes() {
            assert_eq!(d.queues[queue].waiters, named[queue as usize]);
        }
    }
}
