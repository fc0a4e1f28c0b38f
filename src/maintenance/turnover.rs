//! The ring of segments: sealing the current one, truncating finished ones.

use core::cell::Cell;
use core::time::Duration;
use std::collections::BTreeMap;

use super::history::{self, Retentions};
use super::{Context, StepReport};
use crate::dispatch;
use crate::domain::entities::{Db, SEGMENTS, Segment, SegmentState, YOUNG_SEGMENTS, split};
use crate::domain::segments::{self as policy, Disposal, Limits};
use crate::domain::undo::Act;
use crate::domain::unique::State;
use crate::error::{Error, Result};
use crate::pg::debug_point::debug_point;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::{guc, heap, lock, spi, xact};
use crate::store::evidence::{self, Detail, Ends, Evidence, Sight};
use crate::store::segments::{Known, Summary};
use crate::store::unique::{self, Keys};
use crate::store::{claim_index, lanes, queues, segments};

/// How often finished segments are looked for.
const LOOK: Duration = Duration::from_secs(1);

thread_local! {
    /// Segments that were looked at in vain: not again while their `changes` are these, until
    /// a time, so that one that is held up holds up none of the others.
    static UNLISTED: Cell<PutOff> = const { Cell::new([(u64::MAX, 0); SEGMENTS]) };
    static UNCOUNTED: Cell<PutOff> = const { Cell::new([(u64::MAX, 0); SEGMENTS]) };
    static UNTRUNCATED: Cell<PutOff> = const { Cell::new([(u64::MAX, 0); SEGMENTS]) };
}

type PutOff = [(u64, i64); SEGMENTS];
type Which = &'static std::thread::LocalKey<Cell<PutOff>>;

/// After its rows contradicted each other, and after somebody held what was needed, microseconds.
const FAULTY: i64 = 60_000_000;
const HELD: i64 = 1_000_000;
/// While jobs of it are kept there, at most.
const UNDUE: i64 = 5_000_000;
/// While there is a snapshot that is older than the end of its last job.
const HELD_BY_SNAPSHOT: i64 = 50_000;
/// A producer may be waiting for room.
const HELD_FROM_COUNTING: i64 = 100_000;

fn put_off(which: Which, segment: u8, seen: &Segment, pause: i64) {
    let mut all = which.get();
    all[usize::from(segment)] = (seen.changes, xact::micros().saturating_add(pause));
    which.set(all);
}

/// Whether the segment may be looked at.
fn may_look(which: Which) -> impl Fn(u8, &Segment) -> bool {
    let (all, now) = (which.get(), xact::micros());
    move |at, segment| {
        let (changes, until) = all[usize::from(at)];
        changes != segment.changes || now >= until
    }
}

fn states(db: Db) -> [Segment; SEGMENTS] {
    dispatch::with(|d| d.base(db).segments)
}

/// Seals the current segment when it is old or large enough and another one is free.
pub fn rotate(context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    if !dispatch::is_open(db) {
        return Ok(StepReport { did: 0, next: Some(LOOK) });
    }
    let all = states(db);
    let now = xact::micros();
    let interval = guc::rotate_interval();
    let current = dispatch::with(|d| d.base(db).current);
    let (leaves, toasts) = segments::relations(current)?;
    let blocks: u64 =
        leaves.iter().chain(&toasts).map(|oid| u64::from(heap::relation_size_blocks(*oid))).sum();
    let limits = Limits {
        age: if context.forced { 0 } else { interval.as_micros() as i64 },
        size: guc::rotate_size(),
    };
    let next = policy::next_current(
        &all[..usize::from(YOUNG_SEGMENTS)],
        current,
        blocks * segments::BLOCK_SIZE,
        now,
        &limits,
    );
    let pause = Some(interval.clamp(Duration::from_millis(100), LOOK));
    let Some(next) = next else { return Ok(StepReport { did: 0, next: pause }) };
    claim_index::drop_own(next)?;
    dispatch::reserve_log(1)?;
    segments::rotate(next)?;
    let subxact = xact::current_subxact();
    dispatch::with(|d| {
        dispatch::log_act(d, db, subxact, Act::Rotate { segment: next, since: now });
    });
    Ok(StepReport { did: 1, next: pause })
}

/// Writes down what a start would otherwise have to read: the chunks of a sealed segment,
/// and of a disposed one how its jobs ended. One segment a run.
pub fn list(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let pause = Some(guc::rotate_interval().clamp(Duration::from_millis(100), LOOK));
    if !dispatch::is_open(db) {
        return Ok(StepReport { did: 0, next: pause });
    }
    let may = may_look(&UNLISTED);
    let unlisted = dispatch::with(|d| d.segment_to_list(db, &may));
    let Some((segment, seen)) = unlisted else { return Ok(StepReport { did: 0, next: pause }) };
    let evidence = evidence::read(segment, Sight::Everything, Detail::None, i64::MAX)?;
    // On to the next one, at once.
    let put_off = |pause| {
        put_off(&UNLISTED, segment, &seen, pause);
        Ok(StepReport { did: 0, next: Some(Duration::ZERO) })
    };
    if !evidence.pending.is_empty() || !evidence.faults.is_empty() {
        return put_off(if evidence.faults.is_empty() { HELD } else { FAULTY });
    }
    let same = states(db)[usize::from(segment)].changes == seen.changes;
    let finished = is_finished(&evidence) && same && count_ends(db, (segment, &seen), &evidence)?;
    if seen.listed && !finished {
        return put_off(HELD);
    }
    dispatch::reserve_log(1)?;
    if !seen.listed {
        segments::write_directory(segment, evidence.directory())?;
    }
    if finished {
        note_finish(segment, &seen);
        let summary = Summary { bodies: evidence.bodies, last_end: evidence.last_end };
        segments::mark_disposed(segment, summary)?;
    }
    let subxact = xact::current_subxact();
    dispatch::with(|d| {
        let generation = seen.generation;
        dispatch::log_act(d, db, subxact, Act::List { segment, generation, disposed: finished });
    });
    Ok(StepReport { did: 1, next: Some(Duration::ZERO) })
}

/// Makes room in memory, when it is short, for more queues: one stays there until the ends of
/// its jobs are among its totals. One segment a run.
pub fn count(_context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let pause = StepReport { did: 0, next: Some(LOOK) };
    if !dispatch::is_open(db) {
        return Ok(pause);
    }
    let may = may_look(&UNCOUNTED);
    let uncounted = dispatch::with(|d| {
        let asked = core::mem::replace(&mut d.base(db).count_due, false);
        let crowded = asked || d.queues.used() > d.queues.capacity() / 2;
        if crowded { d.segment_to_count(db, &may) } else { None }
    });
    let Some((segment, seen)) = uncounted else { return Ok(pause) };
    let evidence = evidence::read(segment, Sight::Everything, Detail::None, i64::MAX)?;
    if !evidence.faults.is_empty() || !count_ends(db, (segment, &seen), &evidence)? {
        let pause = if evidence.faults.is_empty() { HELD_FROM_COUNTING } else { FAULTY };
        put_off(&UNCOUNTED, segment, &seen, pause);
        return Ok(StepReport { did: 0, next: Some(Duration::ZERO) });
    }
    Ok(StepReport { did: 1, next: pause.next })
}

/// Ends of a segment go from memory to the totals of their queues. False, and nothing done,
/// when they cannot now: a replay runs, which would see either the totals or what memory is
/// to forget but not both, or somebody holds the row of a queue.
fn count_ends(db: Db, (segment, seen): (u8, &Segment), evidence: &Evidence) -> Result<bool> {
    if !dispatch::replay::try_exclude()? {
        return Ok(false);
    }
    let known = segments::read_known()?;
    let Some(known) = known.get(usize::from(segment)) else { return Ok(false) };
    let counted = known.counted.next(&evidence.ends);
    let subxact = xact::current_subxact();
    let Segment { generation, changes, .. } = *seen;
    if counted.last.is_empty() {
        // Nothing to write, but that it was looked at.
        dispatch::reserve_log(1)?;
        let act = Act::Counted { segment, times: known.counted.times, generation, changes };
        dispatch::with(|d| dispatch::log_act(d, db, subxact, act));
        return Ok(true);
    }
    let names = lanes::read_all(Snapshot::SelfNow)?;
    let mut ends: BTreeMap<String, Ends> = BTreeMap::new();
    for (lane, ends_of_lane) in &counted.last {
        let lane = names.get(lane).ok_or_else(|| {
            Error::internal(format!("lane {lane} of segment {segment} has no row"))
        })?;
        ends.entry(lane.queue.clone()).or_default().add(*ends_of_lane);
    }
    let held = queues::read_held()?;
    if ends.keys().any(|name| held.contains(name)) {
        return Ok(false);
    }
    queues::add_totals(&ends)?;
    segments::write_counted(segment, &counted)?;
    debug_point!("ends_counted");
    dispatch::reserve_log(ends.len() + 1)?;
    for (name, ends) in &ends {
        // What memory does not know it does not count.
        dispatch::with(|d| {
            if let Some(queue) = d.queue(db, name) {
                let Ends { completed, failed, cancelled } = *ends;
                let act = Act::Count { queue, completed, failed, cancelled };
                dispatch::log_act(d, db, subxact, act);
            }
        });
    }
    let act = Act::Counted { segment, times: counted.times, generation, changes };
    dispatch::with(|d| dispatch::log_act(d, db, subxact, act));
    Ok(true)
}

/// Truncates a sealed segment of which nothing is left to keep.
pub fn truncate(context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let breath = Duration::from_millis(50);
    let pause = Some(guc::rotate_interval().min(LOOK).max(breath));
    if !dispatch::is_open(db) {
        return Ok(StepReport { did: 0, next: pause });
    }
    let may = may_look(&UNTRUNCATED);
    // One a transaction: its locks go before the next one's are taken.
    let finished = (0..SEGMENTS as u8)
        .zip(states(db))
        .find(|(at, segment)| policy::looks_finished(segment) && may(*at, segment));
    let Some((segment, seen)) = finished else { return Ok(StepReport { did: 0, next: pause }) };
    let known = segments::read_known()?;
    let Some(known) = known.get(usize::from(segment)) else {
        return Ok(StepReport { did: 0, next: pause });
    };
    let retentions = Retentions::read()?;
    let (now, ended) = (xact::micros(), seen.last_end.max(seen.since));
    if now < ended.saturating_add(policy::dump_patience(guc::rotate_interval().as_micros() as i64))
        && !is_forgotten(context, segment, &seen)
    {
        put_off(&UNTRUNCATED, segment, &seen, HELD_BY_SNAPSHOT);
        return Ok(StepReport { did: 0, next: Some(breath) });
    }
    if let Disposal::Wait(until) = retentions.weigh(&known.counted.ends, ended, now) {
        // Somebody may configure another retention meanwhile.
        put_off(&UNTRUNCATED, segment, &seen, until.saturating_sub(now).clamp(0, UNDUE));
        return Ok(StepReport { did: 0, next: Some(breath) });
    }
    let did = try_truncate(context, db, (segment, &seen), (known, &retentions))?;
    if did.is_none() {
        put_off(&UNTRUNCATED, segment, &seen, HELD);
    }
    // There is more to move out, or another segment to be looked at.
    let next = if did.is_some_and(|moved| moved > 1) { Duration::ZERO } else { breath };
    Ok(StepReport { did: did.unwrap_or(0), next: Some(next) })
}

/// Memory proposes, the tables prove: None, and nothing done, when they do not, or when a
/// lock would have to be waited for. Jobs that are still to be kept move out before, some in a
/// run.
fn try_truncate(
    context: &Context,
    db: Db,
    (segment, seen): (u8, &Segment),
    (known, retentions): (&Known, &Retentions),
) -> Result<Option<u64>> {
    let (leaves, toasts) = segments::relations(segment)?;
    let sizes =
        |oids: &[u32]| oids.iter().map(|o| heap::relation_size_blocks(*o)).collect::<Vec<_>>();
    let before = sizes(&leaves);
    // A proof costs a scan: not while a lock is certain to be refused.
    if !leaves.iter().chain(&toasts).all(|oid| lock::is_free(*oid, LockMode::AccessExclusive)) {
        return Ok(None);
    }
    let evidence = evidence::read(segment, Sight::Everything, Detail::None, i64::MAX)?;
    // What was truncated while a dump of it began has nothing left to compare.
    let counted = evidence.emptied || known.counted.ends == evidence.ends;
    if !is_finished(&evidence) || !counted {
        return Ok(None);
    }
    let ended = seen.last_end.max(seen.since);
    let left = retentions.chunks_to_keep(&evidence, ended, xact::micros());
    if !left.is_empty() {
        forget_finish(segment);
        return history::keep(segment, &left, retentions).map(|moved| moved.map(|m| m + 1));
    }
    if evidence.chunks.values().any(|chunk| !chunk.kept.is_empty())
        && !is_forgotten(context, segment, seen)
    {
        return Ok(None);
    }
    debug_point!("truncate_proved", interruptible);
    // TRUNCATE would queue behind a vacuum of the TOAST table while it holds the leaf.
    let mut locked = Vec::with_capacity(leaves.len() + toasts.len());
    for oid in leaves.iter().chain(&toasts) {
        if !lock::lock_conditional(*oid, LockMode::AccessExclusive) {
            give_back(&locked);
            return Ok(None);
        }
        locked.push(*oid);
    }
    debug_point!("truncate_locked", interruptible);
    let now = states(db)[usize::from(segment)];
    let same = now.state == SegmentState::Sealed
        && now.in_flight == 0
        && now.changes == seen.changes
        && now.generation == seen.generation;
    // Rows that did not come through our functions change no counter, and may fit into a page
    // that was there: their commit, before their lock went, asked for a replay.
    if !same || !dispatch::is_trusted(db) || sizes(&leaves) != before {
        give_back(&locked);
        return Ok(None);
    }
    free_keys(segment, &evidence)?;
    dispatch::reserve_log(1)?;
    segments::mark_free(segment)?;
    // Its triggers are for the TRUNCATE of somebody else.
    spi::as_ours(|| heap::truncate(&leaves));
    let subxact = xact::current_subxact();
    dispatch::with(|d| {
        let act = Act::Truncate { segment, generation: now.generation + 1 };
        dispatch::log_act(d, db, subxact, act);
    });
    Ok(Some(1))
}

thread_local! {
    /// Segments whose jobs have all ended, and moved out if they are kept: their generation, and
    /// the transaction that came next.
    static FINISHED: Cell<[(i64, u64); SEGMENTS]> = const { Cell::new([(-1, 0); SEGMENTS]) };
}

/// Whether no snapshot is left that sees the jobs of the segment as they were before their end,
/// or before they moved out: TRUNCATE asks no snapshot, so whoever has such a one would see them
/// nowhere. A dump that has its snapshot and not yet its locks would not have them.
fn is_forgotten(context: &Context, segment: u8, seen: &Segment) -> bool {
    let (generation, _) = FINISHED.get()[usize::from(segment)];
    if generation != seen.generation {
        note_finish(segment, seen);
    }
    let (_, next) = FINISHED.get()[usize::from(segment)];
    // Who calls maintain() has a snapshot that is as old as the call.
    xact::oldest_visible() >= next || context.forced && !xact::others_see_before(next)
}

/// All that ended its jobs has committed: what comes next sees that.
fn note_finish(segment: u8, seen: &Segment) {
    set_finish(segment, (seen.generation, xact::next_xid()));
}

/// This transaction moves more of them out.
fn forget_finish(segment: u8) {
    set_finish(segment, (-1, 0));
}

fn set_finish(segment: u8, finish: (i64, u64)) {
    let mut finished = FINISHED.get();
    finished[usize::from(segment)] = finish;
    FINISHED.set(finished);
}

/// A truncation that is not to be leaves nobody waiting until its transaction ends.
fn give_back(locked: &[u32]) {
    locked.iter().for_each(|oid| lock::unlock(*oid, LockMode::AccessExclusive));
}

/// Every body has its final disposition, and nothing is open, released or in doubt.
fn is_finished(evidence: &Evidence) -> bool {
    evidence.bodies == evidence.disposed
        && evidence.open.is_empty()
        && evidence.released.is_empty()
        && evidence.pending.is_empty()
        && evidence.faults.is_empty()
}

/// Frees the keys that completed jobs held until now: nothing is left of them. Those that moved
/// out hold theirs on.
fn free_keys(segment: u8, evidence: &Evidence) -> Result<()> {
    let keys = Keys::open()?;
    if keys.is_empty() {
        return Ok(());
    }
    unique::of_segment(segment, Snapshot::SelfNow, |job| {
        let (chunk, offset) = split(job.position);
        let chunk = evidence.chunks.get(&chunk);
        let completed =
            chunk.is_some_and(|c| c.completed.contains(offset) && !c.kept.contains(offset));
        if completed && job.mask.has(State::Completed) {
            keys.free(&job.key, job.job_id);
        }
    })
}
