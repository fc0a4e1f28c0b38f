//! Random histories of a whole dispatcher against a naive model.
//!
//! AWA_MODEL_SECONDS: how long (12). AWA_MODEL_SEED: run just this history.

use std::time::{Duration, Instant};

use crate::domain::dispatcher::Taker;
use crate::domain::entities::*;
use crate::memory::Sizes;
use crate::world::{DB, Dice, Settings, World};

const STEPS: usize = 3_000;

fn settings(dice: &mut Dice, bulk: bool) -> Settings {
    let tight = |dice: &mut Dice, small: usize, large: usize| {
        if dice.one_in(3) { small + dice.below(small) } else { large }
    };
    let sizes = Sizes {
        queues: tight(dice, 3, 8),
        lanes: tight(dice, 3, 32),
        chunks: tight(dice, 6, 64),
        pages: tight(dice, 2, 64),
        claims: tight(dice, 3, 200),
        items: if bulk { 4000 } else { tight(dice, 6, 400) },
        releases: tight(dice, 3, 400),
        runtimes: tight(dice, 2, 16),
        doubts: tight(dice, 8, 400),
        waiters: 6,
    };
    let jobs = if bulk { 6000 } else { 60 + dice.below(200) };
    Settings { sizes, bulk, receipts: [20, 5000][dice.below(2)], open: 1 + dice.below(5), jobs }
}

/// Says which history failed.
struct Story(u64, usize);

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("AWA_MODEL_SEED={} failed at step {}", self.0, self.1);
        }
    }
}

fn history(seed: u64) -> World {
    let mut dice = Dice(seed);
    let bulk = seed.is_multiple_of(5);
    let settings = settings(&mut dice, bulk);
    let mut world = World::new(dice.next(), settings);
    let mut story = Story(seed, 0);
    for step in 0..if bulk { STEPS / 6 } else { STEPS } {
        story.1 = step;
        world.step();
        world.check();
    }
    drain(&mut world);
    world
}

/// Everything ends, and nothing is left in memory but who lives and what is durable.
fn drain(world: &mut World) {
    while !world.open.is_empty() {
        world.commit(0);
    }
    while !world.prepared.is_empty() {
        world.end_prepared(0, true);
    }
    world.check();
    world.truth.paused = Default::default();
    let mut d = world.memory.dispatcher();
    for queue in d.queues.indexes().collect::<Vec<_>>() {
        d.queues[queue].paused = false;
    }
    for round in 0.. {
        assert!(round < 10_000, "jobs that nobody can claim: {:?}", world.truth.jobs);
        if world.truth.jobs.is_empty() {
            break;
        }
        world.now += 100_000_000;
        world.return_due();
        let at = world.pick().unwrap();
        world.claim_from(at, &[0, 1, 2, 3, 4], 2000, None, Some(0));
        world.commit(at);
        let at = world.pick().unwrap();
        let open: Vec<i64> = world.truth.receipts.keys().copied().collect();
        world.close_all(at, &open, Taker::Operator);
        world.commit(at);
    }
    world.check();
    let d = world.memory.dispatcher();
    assert_eq!(d.claims.used() + d.items.used() + d.releases.used(), 0);
    assert_eq!(d.doubts.used() + d.pages.used(), 0);
    for lane in d.lanes.indexes() {
        let Lane { ready, chunks, cold, open_chunk, .. } = d.lanes[lane];
        assert_eq!((ready, cold), (0, 0));
        assert!(chunks == u32::from(open_chunk != crate::domain::table::NIL));
    }
    for segment in &d.databases[usize::from(DB)].segments {
        assert_eq!((segment.live, segment.in_flight), (0, 0));
    }
    for queue in d.queues.indexes() {
        assert_eq!(d.queues[queue].pins, 0);
    }
}

fn run(first: u64, step: u64) {
    if let Ok(seed) = std::env::var("AWA_MODEL_SEED") {
        if first == 0 {
            let world = history(seed.parse().unwrap());
            println!("{:?}", world.seen);
        }
        return;
    }
    let seconds = std::env::var("AWA_MODEL_SECONDS").map_or(12, |s| s.parse().unwrap());
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut seed = first;
    let mut seen = std::collections::BTreeMap::new();
    while Instant::now() < end {
        for (what, count) in history(seed).seen {
            *seen.entry(what).or_insert(0) += count;
        }
        seed += step;
    }
    println!("{} histories: {seen:?}", (seed - first) / step);
}

#[test]
fn histories_even() {
    run(0, 2);
}

#[test]
fn histories_odd() {
    run(1, 2);
}
