//! Taking ready jobs.

use super::*;
use crate::domain::ageing::effective_priority;
use crate::domain::undo::{Act, Entry, UndoLog};

/// Who claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// Nobody: the claim ends at its deadline.
    Lease,
    Runtime(u32),
}

#[derive(Clone, Copy, Debug)]
pub struct Request<'r> {
    pub db: Db,
    pub queues: &'r [u32],
    pub want: usize,
    pub owner: Owner,
    /// The claiming transaction, which must have its xid already.
    pub xid: u32,
    pub subxact: u32,
    pub now: i64,
    /// Microseconds from now; None: each queue's own.
    pub deadline: Option<i64>,
    /// The ordering keys of jobs by position, as `ordering::hash` names them: what the caller
    /// has read about jobs of serial queues. In the order of positions.
    pub keys: &'r [(i64, u64)],
}

/// One job taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Popped {
    pub receipt: i64,
    pub position: i64,
    /// Attempts used before, or AS_BODY.
    pub prior: i16,
    pub segment: u8,
    /// Microseconds; MAX: none.
    pub deadline: i64,
    /// The receipt of the first item of its claim.
    pub claim: i64,
    pub lane_id: i64,
    pub queue: u32,
    pub priority: u8,
    /// What its age has made of the priority.
    pub effective: u8,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Claimed {
    /// All that was wanted, or all there is.
    All,
    /// The next job is in this chunk: read which of its rows are committed, `load_chunk`,
    /// and claim the rest. What was popped so far is kept.
    NeedsChunk(Cold),
    /// The ordering keys of open attempts of this queue are not known: read those of
    /// `unsorted`, `sort` them, and claim the rest.
    NeedsTurns(u32),
    /// The ordering key of the next job of this lane is not known: read those of `heads`, and
    /// claim the rest.
    NeedsKeys { lane: u32, warm_only: bool },
}

/// Why no more jobs were taken from a lane.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stop {
    /// Enough, or the next job is not this lane's.
    Done,
    /// The ordering key of the next job is not known.
    Unknown,
    /// Its turn has not come, and there is no room for it to wait.
    Full,
}

/// Where a claim takes its next jobs.
#[derive(Clone, Copy)]
struct From {
    lane: u32,
    /// The lane's priority as its head has aged.
    effective: u8,
    /// As if there were no cold chunks.
    warm_only: bool,
}

/// The head of a lane.
pub(super) enum Source {
    Chunk(u32),
    Cold(Cold),
    Release(u32),
}

impl Dispatcher<'_> {
    /// * `warm_only` - as if there were no cold chunks
    pub(super) fn source(&self, lane: u32, warm_only: bool) -> Option<Source> {
        let Lane { head, returned, .. } = self.lanes[lane];
        let cold = if warm_only { None } else { self.cold_head(lane) };
        let warm = self.chunks.get(head).map_or(i64::MAX, |c| c.number);
        let first = cold.map_or(warm, |c| warm.min(c.number));
        if returned != NIL && self.releases[returned].after < first {
            return Some(Source::Release(returned));
        }
        match cold {
            Some(cold) if cold.number < warm => Some(Source::Cold(cold)),
            _ => (head != NIL).then_some(Source::Chunk(head)),
        }
    }

    /// The lane to claim from next: best effective priority, then the oldest head; and that
    /// priority.
    fn best_lane(&self, queues: &[u32], now: i64, warm_only: bool) -> Option<(u32, u8)> {
        let mut best: Option<((u8, i64, u8), u32)> = None;
        for queue in queues {
            let Queue { paused, mut lanes, ref settings, .. } = self.queues[*queue];
            if paused {
                continue;
            }
            while lanes != NIL {
                if let Some(source) = self.source(lanes, warm_only) {
                    let born = match source {
                        Source::Chunk(at) => self.chunks[at].born,
                        Source::Cold(_) => self.pages[self.lanes[lanes].cold_head].born,
                        Source::Release(at) => self.releases[at].born,
                    };
                    let priority = self.lanes[lanes].priority;
                    let effective =
                        effective_priority(priority, now.saturating_sub(born), settings.ageing);
                    let rank = (effective, born, priority);
                    if best.as_ref().is_none_or(|(b, _)| rank < *b) {
                        best = Some((rank, lanes));
                    }
                }
                lanes = self.lanes[lanes].next;
            }
        }
        best.map(|((effective, ..), lane)| (lane, effective))
    }

    /// When the oldest ready job of a queue was enqueued or became ready, at the earliest.
    pub fn oldest_ready(&self, queue: u32) -> Option<i64> {
        let (mut oldest, mut lane) = (None, self.queues[queue].lanes);
        while lane != NIL {
            let born = self.source(lane, false).map(|source| match source {
                Source::Chunk(at) => self.chunks[at].born,
                Source::Cold(_) => self.pages[self.lanes[lane].cold_head].born,
                Source::Release(at) => self.releases[at].born,
            });
            oldest = match (oldest, born) {
                (Some(a), Some(b)) => Some(i64::min(a, b)),
                (a, b) => a.or(b),
            };
            lane = self.lanes[lane].next;
        }
        match (oldest, self.oldest_blocked(queue)) {
            (Some(a), Some(b)) => Some(i64::min(a, b)),
            (a, b) => a.or(b),
        }
    }

    /// How many jobs could be claimed from a queue now.
    pub fn claimable(&self, queue: u32) -> u64 {
        if self.queues[queue].paused {
            return 0;
        }
        let (mut sum, mut lane) = (0, self.queues[queue].lanes);
        while lane != NIL {
            sum += self.lanes[lane].ready;
            lane = self.lanes[lane].next;
        }
        sum
    }

    /// Takes up to `want` jobs. `popped` and `log` need room for that many.
    pub fn claim(
        &mut self,
        request: &Request<'_>,
        popped: &mut Vec<Popped>,
        log: &mut UndoLog,
    ) -> Result<Claimed, Full> {
        let Request { db, queues, want, now, .. } = *request;
        let Database { next_receipt, end_receipt, .. } = *self.base(db);
        let room = self.items.free().min(self.claims.free());
        let end = popped.len() + want.min(room).min((end_receipt - next_receipt).max(0) as usize);
        let begin = popped.len();
        let mut open: Option<(u32, u8)> = None;
        // Without room to load a chunk, what is in memory goes first: only its end makes room.
        let mut warm_only = false;
        while popped.len() < end {
            let Some((lane, effective)) = self.best_lane(queues, now, warm_only) else { break };
            if let Some(Source::Cold(cold)) = self.source(lane, warm_only) {
                if self.make_room(db, true) {
                    return Ok(Claimed::NeedsChunk(cold));
                }
                warm_only = true;
                continue;
            }
            let Queue { settings, sorted, .. } = self.queues[self.lanes[lane].queue];
            if settings.ordering == Ordering::Serial && !sorted {
                return Ok(Claimed::NeedsTurns(self.lanes[lane].queue));
            }
            let (before, is_aged) = (popped.len(), effective != self.lanes[lane].priority);
            let from = From { lane, effective, warm_only };
            let stop = self.claim_from_lane(request, from, end, &mut open, popped, log);
            if is_aged {
                self.base(db).aged_claims += (popped.len() - before) as u64;
            }
            match stop {
                Stop::Done => {}
                Stop::Unknown => return Ok(Claimed::NeedsKeys { lane, warm_only }),
                Stop::Full if popped.is_empty() => return Err(Full::Timers),
                Stop::Full => return Ok(Claimed::All),
            }
        }
        if room == 0 && want > 0 && self.best_lane(queues, now, false).is_some() {
            return Err(Full::OpenClaims);
        }
        if warm_only && popped.len() == begin {
            return Err(Full::Chunks);
        }
        Ok(Claimed::All)
    }

    fn claim_from_lane(
        &mut self,
        request: &Request<'_>,
        from: From,
        end: usize,
        open: &mut Option<(u32, u8)>,
        popped: &mut Vec<Popped>,
        log: &mut UndoLog,
    ) -> Stop {
        let Request { db, xid, now, .. } = *request;
        let From { lane, effective, warm_only } = from;
        let Lane { id: lane_id, queue, priority, .. } = self.lanes[lane];
        let wait = request.deadline.unwrap_or(self.queues[queue].settings.attempt_deadline);
        let deadline = match request.owner {
            // Nothing else would end a lost attempt.
            Owner::Lease if wait <= 0 => {
                now.saturating_add(QueueSettings::default().attempt_deadline)
            }
            _ if wait <= 0 => i64::MAX,
            _ => now.saturating_add(wait),
        };
        let is_serial = self.queues[queue].settings.ordering == Ordering::Serial;
        let mut first = None;
        while popped.len() < end {
            let Some(source) = self.source(lane, warm_only) else { break };
            // The head was old enough; what lies behind it may not be.
            let number = match source {
                Source::Chunk(at) => self.chunks[at].number,
                Source::Cold(_) => break,
                Source::Release(at) => self.releases[at].chunk,
            };
            if effective != priority && *first.get_or_insert(number) != number {
                break;
            }
            let mut turn = NIL;
            let mut key = 0;
            if is_serial {
                match self.ordering_key(request.keys, lane, &source) {
                    Some(known) => key = known,
                    None => return Stop::Unknown,
                }
                if !self.can_block(queue, key, &source) {
                    return Stop::Full;
                }
            }
            let (number, offset, prior, rollbacks) = match source {
                Source::Chunk(at) => {
                    let chunk = &mut self.chunks[at];
                    let Some(offset) = chunk.bits.pop_first() else { break };
                    chunk.touched = true;
                    chunk.ready -= 1;
                    let (number, ready) = (chunk.number, chunk.ready);
                    if ready == 0 {
                        self.unlink_chunk(at);
                    }
                    (number, offset, AS_BODY, 0)
                }
                Source::Cold(_) => break,
                Source::Release(at) => {
                    let release = &mut self.releases[at];
                    let Some(offset) = release.bits.pop_first() else { break };
                    let Release { chunk, prior, rollbacks, .. } = *release;
                    turn = release.turn;
                    if turn != NIL {
                        self.turns[turn].next = NIL;
                        self.turns[turn].open += 1;
                    }
                    if release.bits.is_empty() {
                        self.pop_returned(lane);
                    } else if turn != NIL {
                        self.block_rest(at);
                    } else {
                        self.popped_from_front(at);
                    }
                    (chunk, offset, prior, rollbacks)
                }
            };
            self.lanes[lane].ready -= 1;
            let segment = match self.chunk(db, number) {
                Some(at) => self.chunks[at].segment,
                // A released job keeps its chunk in memory: this cannot be. Leave the job
                // out rather than hand out one whose body nobody can name.
                None => continue,
            };
            if key != 0 && turn == NIL {
                match self.take_turn(db, queue, key) {
                    Ok(taken) => turn = taken,
                    Err(taken) => {
                        self.block(taken, lane, position(number, offset), prior, rollbacks, now);
                        continue;
                    }
                }
            }
            let claim = match *open {
                Some((at, aged_to))
                    if self.claims[at].lane == lane
                        && self.claims[at].segment == segment
                        && aged_to == effective =>
                {
                    at
                }
                _ => {
                    let at = self.begin_claim(request, lane, segment, deadline, log);
                    *open = Some((at, effective));
                    at
                }
            };
            let receipt = self.base(db).next_receipt;
            self.base(db).next_receipt += 1;
            let position = position(number, offset);
            self.add_item(
                claim,
                Item {
                    aside: 0,
                    db,
                    closing: false,
                    holds: 0,
                    last: u32::MAX,
                    rollbacks,
                    as_body: prior == AS_BODY,
                    keyed: false,
                    noted: false,
                    mark: Mark::default(),
                    prior,
                    closer: 0,
                    claim,
                    receipt,
                    position,
                    deadline,
                    period: Item::period(deadline, now),
                    timer: Default::default(),
                    sorted: is_serial,
                    turn,
                    prev: NIL,
                    next: NIL,
                },
            );
            popped.push(Popped {
                receipt,
                position,
                prior,
                segment,
                deadline,
                claim: self.claims[claim].first,
                lane_id,
                queue,
                priority,
                effective,
            });
        }
        debug_assert!(xid != 0);
        Stop::Done
    }

    fn begin_claim(
        &mut self,
        request: &Request<'_>,
        lane: u32,
        segment: u8,
        deadline: i64,
        log: &mut UndoLog,
    ) -> u32 {
        let Request { db, owner, xid, subxact, now, .. } = *request;
        let first = self.base(db).next_receipt;
        let runtime = match owner {
            Owner::Lease => NIL,
            Owner::Runtime(at) => at,
        };
        let claim = Claim {
            db,
            segment,
            committed: false,
            lane,
            first,
            count: 0,
            open: 0,
            items: NIL,
            runtime,
            xid,
            claimed_at: now,
            timer: Default::default(),
            prev: NIL,
            next: NIL,
        };
        // Room was checked by `claim`: there is an entry for every job it wants.
        let at = self.add_claim(claim).unwrap_or(NIL);
        self.schedule_claim(at, deadline);
        let generation = self.base(db).generation;
        self.base(db).segments[usize::from(segment)].in_flight += 1;
        self.changed(db, segment);
        log.push(Entry { db, generation, subxact, act: Act::Claim { claim: at, first } });
        at
    }

    pub(super) fn add_claim(&mut self, claim: Claim) -> Option<u32> {
        let runtime = claim.runtime;
        let at = self.claims.insert(claim)?;
        if runtime != NIL {
            let next = core::mem::replace(&mut self.runtimes[runtime].claims, at);
            self.claims[at].next = next;
            if next != NIL {
                self.claims[next].prev = at;
            }
        }
        Some(at)
    }

    pub(super) fn add_item(&mut self, claim: u32, mut item: Item) -> Option<u32> {
        item.next = self.claims[claim].items;
        let at = self.items.insert(item)?;
        if item.next != NIL {
            self.items[item.next].prev = at;
        }
        let entry = &mut self.claims[claim];
        entry.items = at;
        entry.count += 1;
        entry.open += 1;
        if entry.runtime != NIL {
            let runtime = entry.runtime;
            self.runtimes[runtime].open += 1;
        }
        Some(at)
    }

    /// Removes an item, and its claim with the last one.
    pub(super) fn remove_item(&mut self, at: u32, now: i64) {
        let Item { db, claim, prev, next, turn, .. } = self.items[at];
        self.end_attempt(turn);
        self.pass_turn(turn, now);
        self.databases[usize::from(db)].callback_wheel.stop(&mut self.items, at);
        self.items.remove(at);
        if prev == NIL {
            self.claims[claim].items = next;
        } else {
            self.items[prev].next = next;
        }
        if next != NIL {
            self.items[next].prev = prev;
        }
        self.claims[claim].open -= 1;
        let Claim { runtime, open, .. } = self.claims[claim];
        if runtime != NIL {
            self.runtimes[runtime].open -= 1;
        }
        // The claim of an open transaction stays until its own act is settled.
        if open == 0 && self.claims[claim].committed {
            self.remove_claim(claim);
        } else {
            self.let_go_of(claim);
        }
    }

    pub(super) fn remove_claim(&mut self, at: u32) {
        let Claim { db, runtime, prev, next, .. } = self.claims[at];
        self.databases[usize::from(db)].claim_wheel.stop(&mut self.claims, at);
        if next != NIL {
            self.claims[next].prev = prev;
        }
        if prev != NIL {
            self.claims[prev].next = next;
        } else if runtime != NIL {
            self.runtimes[runtime].claims = next;
        }
        self.claims.remove(at);
        if runtime != NIL {
            self.forget_dead_runtime(runtime);
        }
    }

    pub(super) fn schedule_claim(&mut self, at: u32, deadline: i64) {
        let db = self.claims[at].db;
        let database = &mut self.databases[usize::from(db)];
        if deadline == i64::MAX {
            database.claim_wheel.stop(&mut self.claims, at);
        } else {
            database.claim_wheel.start(&mut self.claims, at, deadline);
            self.wake_worker_for(db, deadline);
        }
    }

    /// Tells that the body of an item has a unique key.
    pub fn mark_keyed(&mut self, db: Db, receipt: i64) {
        if let Some(at) = self.item(db, receipt) {
            self.items[at].keyed = true;
        }
    }

    /// What reading the body of a claimed job told: its attempts, and its own deadline.
    pub fn describe_item(&mut self, db: Db, receipt: i64, prior: i16, deadline: i64) {
        let Some(at) = self.item(db, receipt) else { return };
        self.items[at].prior = prior;
        if self.items[at].deadline != deadline {
            let claim = self.items[at].claim;
            self.items[at].deadline = deadline;
            self.items[at].period = Item::period(deadline, self.claims[claim].claimed_at);
            let timer = self.claims[claim].timer;
            if deadline < i64::MAX && (!timer.is_running() || deadline < timer.at) {
                self.schedule_claim(claim, deadline);
            }
        }
    }
}
