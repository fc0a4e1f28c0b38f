//! Small pure pieces, each against the obvious definition.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use crate::domain::ageing::effective_priority;
use crate::domain::backoff::Backoff;
use crate::domain::bits::{Bits, CHUNK_SIZE};
use crate::domain::entities::{Chunk, position, split};
use crate::domain::name;
use crate::domain::page::{PAGE_CHUNKS, Page};
use crate::domain::receipt::{COUNTER_BITS, PER_EPOCH, first_of, next_epoch};
use crate::domain::table::{Entry, Head, Slot, Table, mix};
use crate::domain::undo::{Act, End, Entry as Log, UndoLog};

#[derive(Clone, Copy)]
struct Pair(u16, u32);

impl Entry for Pair {
    fn hash(&self) -> u64 {
        // Few hashes, so that chains are long.
        mix(u64::from(self.0 % 5))
    }
}

fn entry(subxact: u32, mark: i64) -> Log {
    Log { db: 0, generation: 1, subxact, act: Act::Claim { claim: 0, first: mark } }
}

fn mark(entry: &Log) -> i64 {
    match entry.act {
        Act::Claim { first, .. } => first,
        _ => -1,
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn bits_are_a_set(acts in prop::collection::vec((0..6_u8, 0..1024_u16, 0..=1024_u16), 0..200)) {
        let (mut bits, mut set) = (Bits::default(), BTreeSet::new());
        for (act, bit, count) in acts {
            match act {
                0 => prop_assert_eq!(bits.insert(bit), set.insert(bit)),
                1 => prop_assert_eq!(bits.remove(bit), set.remove(&bit)),
                2 => prop_assert_eq!(bits.pop_first(), set.pop_first()),
                3 => {
                    let count = count.min(CHUNK_SIZE as u16 - bit);
                    bits.insert_range(bit, count);
                    set.extend(bit..bit + count);
                }
                4 => {
                    let mut more = Bits::default();
                    more.insert(bit);
                    bits.insert_all(&more);
                    set.insert(bit);
                }
                _ => prop_assert_eq!(bits.contains(bit), set.contains(&bit)),
            }
            prop_assert_eq!(usize::from(bits.count()), set.len());
            prop_assert_eq!(bits.first(), set.first().copied());
            prop_assert_eq!(bits.is_empty(), set.is_empty());
        }
        prop_assert!(bits.iter().eq(set.iter().copied()));
    }

    #[test]
    fn a_table_is_a_map(acts in prop::collection::vec((0..4_u8, 0..20_u16, any::<u32>()), 0..300)) {
        let (mut head, mut buckets) = (Head::default(), vec![0; 16]);
        let mut slots = vec![Slot::vacant(Pair(0, 0)); 12];
        let mut table = Table::new(&mut head, &mut buckets, &mut slots);
        table.format();
        let mut map = BTreeMap::new();
        for (act, key, value) in acts {
            let found = table.find(Pair(key, 0).hash(), |p| p.0 == key);
            prop_assert_eq!(found.map(|at| table[at].1), map.get(&key).copied());
            match (act, found) {
                (0 | 1, None) => {
                    let at = table.insert(Pair(key, value));
                    prop_assert_eq!(at.is_some(), map.len() < 12);
                    if at.is_some() {
                        map.insert(key, value);
                    }
                }
                (2, Some(at)) => {
                    table.remove(at);
                    map.remove(&key);
                    prop_assert!(table.get(at).is_none());
                }
                (3, _) if value.is_multiple_of(50) => {
                    table.format();
                    map.clear();
                    prop_assert!((0..12).all(|at| table.get(at).is_none()));
                }
                _ => {}
            }
            prop_assert_eq!((table.used(), table.free()), (map.len(), 12 - map.len()));
            let in_use: BTreeMap<u16, u32> =
                table.indexes().map(|at| (table[at].0, table[at].1)).collect();
            prop_assert_eq!(&in_use, &map);
        }
        table.remove_where(|p| p.0 % 2 == 0);
        prop_assert_eq!(table.used(), map.keys().filter(|k| *k % 2 == 1).count());
    }

    #[test]
    fn epochs_grow(stored in any::<Option<i64>>(), now in any::<i64>()) {
        if let Some(epoch) = next_epoch(stored, now) {
            prop_assert!(epoch >= 1 && stored.is_none_or(|s| epoch > s));
            prop_assert!(first_of(epoch) > 0);
            prop_assert!(first_of(epoch).checked_add(PER_EPOCH - 1).is_some());
            prop_assert_eq!(first_of(epoch) >> COUNTER_BITS, epoch);
        }
    }

    #[test]
    fn no_backoff_overflows(
        base in any::<i64>(),
        factor in any::<f64>(),
        jitter in any::<f64>(),
        max in any::<i64>(),
        attempt in any::<i16>(),
        random in 0.0..1.0_f64,
    ) {
        let delay = Backoff { base, factor, jitter, max }.delay(attempt, random);
        prop_assert!(delay >= 0 && delay <= max.max(0));
    }

    #[test]
    fn ageing_stays_in_range(
        priority in 0..=4_u8,
        age in any::<i64>(),
        step in any::<i64>(),
    ) {
        let effective = effective_priority(priority, age, step);
        prop_assert!(effective <= priority && effective >= priority.min(1));
        prop_assert!(effective_priority(priority, age.saturating_add(1), step) <= effective);
    }

    #[test]
    fn names_are_checked_by_character(text in "\\PC{0,205}", control in any::<bool>()) {
        let text = if control { format!("{text}\u{7}") } else { text };
        let chars = text.chars().count();
        let good = (1..=200).contains(&chars) && !text.chars().any(char::is_control);
        prop_assert_eq!(name::check(&text).is_ok(), good);
    }

    #[test]
    fn positions_split(chunk in 0..1_i64 << 52, offset in 0..1024_u16) {
        prop_assert_eq!(split(position(chunk, offset)), (chunk, offset));
    }

    /// Savepoints as a stack of vectors.
    #[test]
    fn the_undo_log_follows_savepoints(acts in prop::collection::vec(0..5_u8, 0..200)) {
        let mut log = UndoLog::new();
        let mut stack: Vec<(u32, Vec<i64>)> = vec![(1, vec![])];
        let (mut next, mut number) = (2, 0);
        for act in acts {
            match act {
                0 | 1 => {
                    number += 1;
                    log.push(entry(stack.last().unwrap().0, number));
                    stack.last_mut().unwrap().1.push(number);
                }
                2 => {
                    stack.push((next, vec![]));
                    next += 1;
                }
                3 if stack.len() > 1 => {
                    let (id, acts) = stack.pop().unwrap();
                    let (parent, of_parent) = stack.last_mut().unwrap();
                    log.relabel(id, *parent);
                    of_parent.extend(acts);
                }
                4 if stack.len() > 1 => {
                    let (id, mut acts) = stack.pop().unwrap();
                    while let Some(undone) = log.pop_from(id) {
                        prop_assert_eq!(Some(mark(&undone)), acts.pop());
                    }
                    prop_assert!(acts.is_empty());
                }
                _ => {}
            }
            let all: Vec<i64> = stack.iter().flat_map(|s| s.1.iter().copied()).collect();
            let logged: Vec<i64> = log.entries().iter().map(mark).collect();
            prop_assert_eq!(logged, all);
        }
    }

    #[test]
    fn a_page_is_a_sorted_list(acts in prop::collection::vec((any::<bool>(), 0..60_i64), 0..200)) {
        let chunk = |number: i64| Chunk {
            number: (Page::MAX_NUMBER - 60) + number,
            ready: 1 + (number * 17) as u16,
            ..Chunk::empty(0, (number % 16) as u8, (3, 0), number)
        };
        let mut page = Page::empty(&chunk(0), 0, 0);
        let mut set = BTreeSet::new();
        for (add, number) in acts {
            match page.place(chunk(number).number) {
                Ok(slot) => {
                    prop_assert!(set.contains(&number));
                    prop_assert_eq!(page.ready(slot), chunk(number).ready);
                    prop_assert_eq!(page.segment(slot), chunk(number).segment);
                    if !add {
                        page.remove(slot);
                        set.remove(&number);
                    }
                }
                Err(_) => {
                    prop_assert!(!set.contains(&number));
                    if add && set.len() < PAGE_CHUNKS {
                        page.add(&chunk(number));
                        set.insert(number);
                    }
                }
            }
            prop_assert_eq!(usize::from(page.count), set.len());
        }
    }
}

#[test]
fn backoff_grows_to_its_maximum() {
    let backoff = Backoff::default();
    let mut last = 0;
    for attempt in 1..=1000 {
        let delay = backoff.delay(attempt, 0.0);
        assert!(delay >= last && delay <= backoff.max, "attempt {attempt}");
        assert!(backoff.delay(attempt, 0.999) <= backoff.max);
        last = delay;
    }
    assert_eq!(last, backoff.max);
    assert_eq!(backoff.delay(1, 0.0), 2_000_000);
    assert_eq!(Backoff { base: 0, ..backoff }.delay(i16::MAX, 0.5), 0);
}

#[test]
fn ageing_at_the_ends_of_time() {
    assert_eq!(effective_priority(4, i64::MIN, 1), 4);
    assert_eq!(effective_priority(4, i64::MAX, 1), 1);
    assert_eq!(effective_priority(4, 120_000_000, 60_000_000), 2);
    assert_eq!(effective_priority(4, 120_000_000, 0), 4);
}

#[test]
fn epochs_are_never_repeated() {
    assert_eq!(next_epoch(Some(i64::MAX), 0), None);
    assert_eq!(next_epoch(Some((1 << 38) - 1), 0), None);
    assert_eq!(next_epoch(None, i64::MIN), Some(1));
    // The clock was set back.
    let epoch = next_epoch(None, 900_000_000_000_000).unwrap();
    assert_eq!(next_epoch(Some(epoch), 850_000_000_000_000), Some(epoch + 1));
}

#[test]
fn decide_changes_a_close_and_nothing_else() {
    let mut log = UndoLog::new();
    let claim = log.push(entry(1, 5));
    let act = Act::Close { item: 1, receipt: 2, end: End::Undecided };
    let close = log.push(Log { act, ..entry(1, 0) });
    log.decide(close, End::Completed);
    log.decide(claim, End::Completed);
    log.decide(77, End::Completed);
    assert_eq!(log.entries()[close].act, Act::Close { item: 1, receipt: 2, end: End::Completed });
    assert_eq!(mark(&log.entries()[claim]), 5);
}

#[test]
fn a_directory_reads_back() {
    use crate::domain::bits::Bits;
    use crate::domain::directory::{Listed, decode, encode};
    let mut some = Bits::default();
    let mut full = Bits::default();
    full.insert_range(0, 1024);
    for bit in [0, 1, 63, 64, 1000, 1023] {
        some.insert(bit);
    }
    let chunks = [
        Listed { number: 1024, lane_id: 7, born: -5, bodies: some },
        Listed { number: i64::MAX, lane_id: i64::MIN, born: i64::MAX, bodies: full },
        Listed { number: 0, lane_id: 0, born: 0, bodies: Bits::default() },
    ];
    let bytes = encode(chunks);
    assert_eq!(decode(&bytes).as_deref(), Some(&chunks[..]));
    assert_eq!(decode(&encode([])), Some(Vec::new()));
    // Cut short, or of another version: not a directory, and no panic.
    for end in (0..bytes.len()).filter(|end| ![1, 154, 179].contains(end)) {
        assert_eq!(decode(&bytes[..end]), None, "{end}");
    }
    assert_eq!(decode(&[9]), None);
}
