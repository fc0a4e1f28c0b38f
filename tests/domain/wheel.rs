//! The timing wheel against a list.

use std::collections::BTreeMap;

use proptest::prelude::*;

use crate::domain::wheel::{Timer, Timers, Wheel};

struct Plain(Vec<Timer>);

impl Timers for Plain {
    fn timer(&mut self, entry: u32) -> &mut Timer {
        &mut self.0[entry as usize]
    }
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Start(u32, i64),
    Stop(u32),
    /// Time passes, and some of what is due is taken.
    Pass(i64, usize),
}

fn far() -> impl Strategy<Value = i64> {
    prop_oneof![
        4 => -5_000..200_000_i64,
        3 => 0..5_000_000_i64,
        2 => 0..100_000_000_000_i64,
        1 => any::<i64>(),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        5 => (0..40_u32, far()).prop_map(|(entry, ahead)| Op::Start(entry, ahead)),
        1 => (0..40_u32).prop_map(Op::Stop),
        3 => (0..3_000_i64, 0..50_usize).prop_map(|(ahead, take)| Op::Pass(ahead, take)),
        2 => (0..10_000_000_i64, 0..50_usize).prop_map(|(ahead, take)| Op::Pass(ahead, take)),
        1 => (0..1_000_000_000_000_i64, 0..50_usize).prop_map(|(ahead, take)| Op::Pass(ahead, take)),
    ]
}

/// The time at which a timer comes up: the tick at or after it.
fn tick(at: i64) -> i64 {
    at.saturating_add(999).div_euclid(1000)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..Default::default() })]

    #[test]
    fn a_wheel_is_a_sorted_list(start in -1_000_000_000..1_000_000_000_000_i64, ops in prop::collection::vec(op(), 1..200)) {
        let mut wheel = Wheel::default();
        wheel.format(start);
        let mut timers = Plain(vec![Timer::default(); 40]);
        let mut model: BTreeMap<u32, i64> = BTreeMap::new();
        let mut now = start;
        for op in ops {
            match op {
                Op::Start(entry, ahead) => {
                    let at = now.saturating_add(ahead);
                    wheel.start(&mut timers, entry, at);
                    model.insert(entry, at);
                }
                Op::Stop(entry) => {
                    wheel.stop(&mut timers, entry);
                    model.remove(&entry);
                }
                Op::Pass(ahead, take) => {
                    now += ahead;
                    for _ in 0..take {
                        let Some(entry) = wheel.pop_due(&mut timers, now) else {
                            let late = model.values().any(|at| tick(*at) <= now.div_euclid(1000));
                            prop_assert!(!late, "a timer is late or lost");
                            break;
                        };
                        let at = model.remove(&entry).expect("a stopped timer");
                        prop_assert!(tick(at) <= now.div_euclid(1000), "a timer is early");
                    }
                }
            }
            for entry in 0..40 {
                let running = timers.0[entry as usize].is_running();
                prop_assert_eq!(running, model.contains_key(&entry));
            }
            let look = wheel.next_look();
            prop_assert_eq!(look.is_none(), model.is_empty());
            if let (Some(look), Some(next)) = (look, model.values().min()) {
                // In ticks, and never in the past of what the wheel has seen.
                prop_assert!(look <= tick(*next).max(now.div_euclid(1000)).saturating_mul(1000));
            }
        }
        // Whoever sleeps until the next look misses nothing and comes to an end.
        let mut looks = 0;
        while let Some(look) = wheel.next_look().filter(|_| looks < 2_000) {
            now = now.max(look);
            while let Some(entry) = wheel.pop_due(&mut timers, now) {
                let at = model.remove(&entry).unwrap();
                prop_assert!(at <= now);
                let on_time = tick(at).saturating_mul(1000);
                prop_assert!(on_time >= now - 1000 || on_time <= now);
            }
            looks += 1;
        }
    }
}

#[test]
fn timers_of_one_time_keep_their_order() {
    let mut wheel = Wheel::default();
    wheel.format(0);
    let mut timers = Plain(vec![Timer::default(); 100]);
    for entry in 0..100 {
        wheel.start(&mut timers, entry, 777_000_000);
    }
    let mut popped = Vec::new();
    let mut now = 0;
    while popped.len() < 100 {
        now += 1_000_000;
        while let Some(entry) = wheel.pop_due(&mut timers, now) {
            popped.push(entry);
        }
    }
    assert!(popped.is_sorted());
    assert_eq!(now, 777_000_000);
}
