//! Waiters, lanes and doubts where an exact outcome is easier to say than to model.

use crate::domain::bits::Bits;
use crate::domain::dispatcher::*;
use crate::domain::entities::*;
use crate::domain::undo::{Act, UndoLog};
use crate::memory::{Memory, Sizes, runtime};

const ROOMY: Sizes = Sizes {
    queues: 40,
    lanes: 40,
    chunks: 64,
    pages: 16,
    claims: 100,
    items: 3000,
    releases: 100,
    runtimes: 4,
    doubts: 20_000,
    waiters: 8,
};

fn open(memory: &mut Memory) -> Dispatcher<'_> {
    let mut d = memory.dispatcher();
    let mut segments = [Segment::default(); SEGMENTS];
    segments[0].state = SegmentState::Current;
    d.attach(1, 1, (1, 1000), &segments, 0, 0).unwrap();
    d.finish_replay(0, (1, 100_000), i64::MAX);
    d
}

fn lane(d: &mut Dispatcher<'_>, queue: &str, priority: u8) -> u32 {
    let at = d.ensure_queue(0, queue).unwrap();
    let id = d.take_number(0).unwrap();
    d.add_lane(0, at, priority, 0, id, true).unwrap();
    at
}

fn produce(d: &mut Dispatcher<'_>, queue: &str, priority: u8, count: usize, now: i64) {
    let mut log = UndoLog::new();
    let mut left = count;
    while left > 0 {
        match d.enqueue(0, queue, (priority, 0), left, now, &mut log, 1).unwrap() {
            Granted::Some(grant) => left -= usize::from(grant.count),
            other => panic!("{other:?}"),
        }
    }
    for entry in log.entries() {
        d.settle(entry, now);
    }
}

fn request(queues: &[u32], want: usize, now: i64) -> Request<'_> {
    let owner = Owner::Lease;
    Request { db: 0, queues, want, owner, xid: 9, subxact: 1, now, deadline: None, keys: &[] }
}

#[test]
fn a_waiter_for_many_queues_is_woken_by_each() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let queues: Vec<u32> = (0..20).map(|n| lane(&mut d, &format!("q{n}"), 1)).collect();
    for round in 0..20 {
        assert!(d.start_wait(3, 0, &queues));
        produce(&mut d, &format!("q{round}"), 1, 1, 0);
        assert_eq!(d.wakes.as_slice(), [3]);
        d.wakes.clear();
        assert!(d.stop_wait(3));
        let (mut popped, mut log) = (Vec::new(), UndoLog::new());
        assert_eq!(d.claim(&request(&queues, 5, 0), &mut popped, &mut log), Ok(Claimed::All));
        assert_eq!(popped.len(), 1);
    }
    assert!(queues.iter().all(|q| d.queues[*q].waiters == 0));
    assert_eq!(d.databases[0].wide_waiters, 0);
}

#[test]
fn jobs_wake_the_longest_waits_and_a_leaver_passes_on() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let queue = lane(&mut d, "q", 1);
    for proc in [5, 2, 7] {
        assert!(d.start_wait(proc, 0, &[queue]));
    }
    produce(&mut d, "q", 1, 1, 0);
    assert_eq!(d.wakes.as_slice(), [5]);
    d.wakes.clear();
    d.abandon_wait(5);
    assert_eq!(d.wakes.as_slice(), [2]);
    d.wakes.clear();
    produce(&mut d, "q", 1, 10, 0);
    assert_eq!(d.wakes.as_slice(), [7]);
}

#[test]
fn who_was_woken_and_takes_nothing_passes_on() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let queue = lane(&mut d, "q", 1);
    assert!(d.start_wait(5, 0, &[queue]));
    assert!(d.start_wait(6, 0, &[queue]));
    produce(&mut d, "q", 1, 1, 0);
    assert_eq!(d.wakes.as_slice(), [5]);
    d.wakes.clear();
    assert!(d.wake_up(5));
    // Cancelled before its claim.
    d.abandon_wait(5);
    assert_eq!(d.wakes.as_slice(), [6]);
    d.wakes.clear();
    assert!(d.wake_up(6));
    assert!(d.stop_wait(6));
    assert!(!d.wake_up(6));
    assert_eq!(d.queues[queue].waiters, 0);
}

#[test]
fn a_database_that_goes_dismisses_its_waiters() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let queue = lane(&mut d, "q", 1);
    assert!(d.start_wait(5, 0, &[queue]));
    d.detach(0);
    assert_eq!(d.wakes.as_slice(), [5]);
    assert!(!d.stop_wait(5));
}

#[test]
fn the_oldest_head_of_the_best_priority_goes_first() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let a = lane(&mut d, "a", 3);
    let b = lane(&mut d, "b", 2);
    produce(&mut d, "a", 3, 1, 0);
    produce(&mut d, "b", 2, 2, 50_000_000);
    let mut log = UndoLog::new();
    let mut first = |d: &mut Dispatcher<'_>, now| {
        let mut popped = Vec::new();
        assert!(d.claim(&request(&[a, b], 1, now), &mut popped, &mut log).is_ok());
        popped[0].queue
    };
    assert_eq!(first(&mut d, 55_000_000), b);
    assert_eq!(d.databases[0].aged_claims, 0);
    // A minute makes up for a priority, and the older head wins.
    assert_eq!(first(&mut d, 60_000_000), a);
    assert_eq!(d.databases[0].aged_claims, 1);
}

#[test]
fn many_doubts_are_settled_in_linear_time() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let queue = lane(&mut d, "q", 1);
    let mut log = UndoLog::new();
    for _ in 0..20_000 {
        let act = Act::Defer { queue, retryable: false, count: 1, due: 5 };
        d.note(0, 1, act, &mut log);
    }
    assert_eq!(d.keep_doubts(77, log.entries()), Some(0));
    assert_eq!((d.doubts.free(), d.queues[queue].pins), (0, 20_000));
    // Quadratic this took 400 million steps.
    d.settle_doubts(77, true, 0);
    assert_eq!((d.doubts.used(), d.queues[queue].pins), (0, 0));
    assert_eq!(d.queues[queue].counts.scheduled, 20_000);
}

#[test]
fn a_rebuild_waits_for_producers_between_their_grant_and_their_rows() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let (early, late) = (d.begin_write(0), d.begin_write(0));
    let done = d.begin_write(0);
    assert!(d.end_write(0, done));
    let segments = d.base(0).segments;
    d.begin_rebuild(0, (5000, 10), &segments, 0);
    assert_eq!(d.stragglers(0), 2);
    let after = d.begin_write(0);
    assert!(d.end_write(0, after), "those of the new memory are not waited for");
    assert!(d.end_write(0, early));
    assert_eq!(d.stragglers(0), 1);
    d.leave_stragglers(0);
    assert!(!d.end_write(0, late), "replay may have passed by its rows");
}

#[test]
fn a_rebuild_keeps_the_doubts_that_no_row_tells() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let queue = lane(&mut d, "q", 1);
    let mut log = UndoLog::new();
    let defer = Act::Defer { queue, retryable: false, count: 1, due: 5 };
    for act in
        [defer, Act::Pause { queue, paused: false }, defer, Act::Pause { queue, paused: true }]
    {
        d.note(0, 1, act, &mut log);
    }
    assert_eq!(d.keep_doubts(77, log.entries()), Some(0));
    let segments = d.base(0).segments;
    d.begin_rebuild(0, (5000, 10), &segments, 0);
    assert_eq!((d.doubts.used(), d.queues[queue].pins), (2, 2));
    d.finish_replay(0, (1, 2), i64::MAX);
    d.settle_doubts(77, true, 0);
    assert_eq!((d.doubts.used(), d.queues[queue].pins), (0, 0));
    assert!(d.queues[queue].paused);
    assert_eq!(d.queues[queue].counts.scheduled, 0);
}

#[test]
fn a_prepare_that_fails_drops_its_own_doubts_only() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let queue = lane(&mut d, "q", 1);
    let act = Act::Configure { queue };
    d.restore_doubt(Doubt { db: 0, xid: 77, order: 0, act }).unwrap();
    let mut log = UndoLog::new();
    d.note(0, 1, act, &mut log);
    let first = d.keep_doubts(77, log.entries()).unwrap();
    d.drop_doubts(77, first);
    assert_eq!(d.doubts.used(), 1);
}

#[test]
fn chunk_numbers_only_grow() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    while d.take_number(0).is_some() {}
    d.add_block(0, 3000, 1);
    assert_eq!(d.take_number(0), Some(3000));
    d.add_block(0, 2000, 10);
    assert_eq!(d.take_number(0), None);
}

#[test]
fn a_backlog_larger_than_memory_is_claimed_in_order() {
    let mut memory = Memory::new(&Sizes { chunks: 8, items: 70_000, ..ROOMY });
    let mut d = open(&mut memory);
    let queue = lane(&mut d, "q", 1);
    for _ in 0..60 {
        produce(&mut d, "q", 1, 1024, 0);
    }
    assert!(d.chunks.used() <= 7 && d.pages.used() >= 2);
    let all = d.claimable(queue);
    assert_eq!(all, 60 * 1024);
    assert_eq!(d.queues[queue].counts.available, 60 * 1024);
    let (mut last, mut seen) = (0, 0);
    while d.claimable(queue) > 0 {
        let (mut popped, mut log) = (Vec::new(), UndoLog::new());
        if let Claimed::NeedsChunk(cold) =
            d.claim(&request(&[queue], 700, 0), &mut popped, &mut log).unwrap()
        {
            assert_eq!(d.cold(0, cold.number), Some(cold));
            let mut bits = Bits::default();
            bits.insert_range(0, 1024);
            assert_eq!(d.load_chunk(0, cold.number, &bits), Ok(Loaded::Ready));
        }
        for job in &popped {
            assert!(job.position > last);
            last = job.position;
            seen += 1;
        }
        for entry in log.entries() {
            d.settle(entry, 0);
        }
        for job in &popped {
            let mut log = UndoLog::new();
            let Take::Taken(taken) = d.take(0, job.receipt, 9, 1, Taker::Owner, &mut log) else {
                panic!("stale")
            };
            log.decide(taken.log, crate::domain::undo::End::Completed);
            d.settle(&log.entries()[0], 0);
        }
    }
    assert_eq!((seen, d.pages.used(), d.chunks.used()), (60 * 1024, 0, 0));
}

#[test]
fn doubts_are_settled_in_the_order_of_their_acts() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let queue = lane(&mut d, "q", 1);
    let mut log = UndoLog::new();
    for paused in [true, false, true, false, true] {
        d.note(0, 1, Act::Pause { queue, paused }, &mut log);
    }
    assert_eq!(d.keep_doubts(77, log.entries()), Some(0));
    d.settle_doubts(77, true, 0);
    assert!(d.queues[queue].paused);
    // The number a caller gives does not matter, the order of restoring does.
    for (order, paused) in [(9, true), (3, false)] {
        let act = Act::Pause { queue, paused };
        d.restore_doubt(Doubt { db: 0, xid: 78, order, act }).unwrap();
    }
    d.settle_doubts(78, true, 0);
    assert!(!d.queues[queue].paused);
}

/// A claim of one job by a runtime of the backend 7, and the receipt.
fn owned(d: &mut Dispatcher<'_>, id: u8, queue: u32) -> (u32, i64) {
    let at = d.register(Runtime { proc: 8, pid: 70, ..runtime([id; 16]) }, 0).unwrap();
    produce(d, "q", 1, 1, 0);
    let (mut popped, mut log) = (Vec::new(), UndoLog::new());
    let queues = [queue];
    let owned = Request { owner: Owner::Runtime(at), ..request(&queues, 1, 0) };
    assert_eq!(d.claim(&owned, &mut popped, &mut log), Ok(Claimed::All));
    for entry in log.entries() {
        d.settle(entry, 0);
    }
    d.wakes.clear();
    (at, popped[0].receipt)
}

#[test]
fn a_request_to_stop_ends_the_waits_of_the_owner_or_the_next_one() {
    let mut memory = Memory::new(&ROOMY);
    let mut d = open(&mut memory);
    let queue = lane(&mut d, "q", 1);
    let (at, receipt) = owned(&mut d, 1, queue);
    let (_, other) = owned(&mut d, 2, queue);
    let id = d.runtimes[at].id;
    let asked = Mark { asked: true, ..Mark::default() };
    // Nobody waits: the next wait is told, once, and only one of the owner.
    d.restore_mark(0, receipt, asked, 0);
    assert!(d.start_wait(3, 0, &[queue]));
    assert!(!d.wait_as(3, 30, None));
    assert!(d.start_wait(7, 0, &[queue]));
    assert!(!d.wait_as(7, 71, None), "another backend has the place of the one that registered");
    assert!(d.wait_as(7, 70, None));
    assert!(!d.wait_as(7, 70, None));
    // Those who wait are told, by the name of the runtime as well.
    assert!(d.start_wait(4, 0, &[queue]));
    assert!(!d.wait_as(4, 40, Some(d.runtimes[at].id)));
    d.restore_mark(0, receipt, Mark::default(), 0);
    d.restore_mark(0, receipt, asked, 0);
    assert!(!d.waiters[3].asked && d.waiters[7].asked && d.waiters[4].asked);
    assert_eq!(d.wakes.as_slice(), [7, 4]);
    d.wakes.clear();
    for proc in [3, 4, 7] {
        assert!(!d.stop_wait(proc));
    }
    // Told, they begin anew; a request that is there already tells nobody.
    assert!(d.start_wait(4, 0, &[queue]));
    assert!(!d.wait_as(4, 40, Some(id)));
    d.restore_mark(0, receipt, asked, 0);
    assert!(!d.waiters[4].asked);
    d.restore_mark(0, other, asked, 0);
    assert!(!d.waiters[4].asked);
    assert!(d.start_wait(7, 0, &[queue]));
    assert!(d.wait_as(7, 70, None));
    assert!(!d.base(0).owners_asked);
}
