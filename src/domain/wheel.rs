//! A hierarchical timing wheel (Varghese and Lauck, 1987): starting and stopping
//! a timer is O(1) whatever the number of timers, and the lists run through the
//! entries themselves.

use super::table::NIL;

/// One tick, in microseconds.
const TICK: i64 = 1000;
const LEVELS: usize = 7;
/// The furthest a timer can be ahead, in ticks (139 years); later ones are put there.
const HORIZON: i64 = 1 << (6 * LEVELS - 1);
/// The list of timers that are due but were not taken yet.
const DUE: u16 = (LEVELS * 64) as u16;
const STOPPED: u16 = 0;

/// The part of an entry that a wheel owns. All zeros is a stopped timer.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Timer {
    /// Microseconds.
    pub at: i64,
    /// The first of a list has the last here.
    prev: u32,
    next: u32,
    /// One more than the index of the list the timer is in.
    list: u16,
}

impl Timer {
    /// A timer that knows its time but was not started.
    pub fn stopped(at: i64) -> Self {
        Self { at, ..Self::default() }
    }

    pub fn is_running(&self) -> bool {
        self.list != STOPPED
    }
}

/// Where a wheel finds the timers of its entries.
pub trait Timers {
    fn timer(&mut self, entry: u32) -> &mut Timer;
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct Wheel {
    /// In ticks: everything up to here was moved to the due list.
    now: i64,
    occupied: [u64; LEVELS],
    lists: [u32; LEVELS * 64 + 1],
}

impl Default for Wheel {
    fn default() -> Self {
        Self { now: 0, occupied: [0; LEVELS], lists: [NIL; LEVELS * 64 + 1] }
    }
}

impl Wheel {
    pub fn format(&mut self, now: i64) {
        *self = Self { now: now.div_euclid(TICK), ..Self::default() };
    }

    fn list_of(&self, at: i64) -> u16 {
        // Rounded up, so that no timer is early.
        let tick = at.saturating_add(TICK - 1).div_euclid(TICK);
        let ahead = tick.saturating_sub(self.now).min(HORIZON);
        if ahead <= 0 {
            return DUE;
        }
        let level = ((63 - ahead.leading_zeros()) / 6) as usize;
        let slot = ((self.now + ahead) >> (6 * level)) & 63;
        (level * 64) as u16 + slot as u16
    }

    pub fn start(&mut self, timers: &mut impl Timers, entry: u32, at: i64) {
        self.stop(timers, entry);
        let list = self.list_of(at);
        // At the end, so that timers of one time come up in the order they were started.
        let head = self.lists[usize::from(list)];
        let prev = if head == NIL {
            self.lists[usize::from(list)] = entry;
            entry
        } else {
            let tail = core::mem::replace(&mut timers.timer(head).prev, entry);
            timers.timer(tail).next = entry;
            tail
        };
        *timers.timer(entry) = Timer { at, prev, next: NIL, list: list + 1 };
        if list != DUE {
            self.occupied[usize::from(list) / 64] |= 1 << (list % 64);
        }
    }

    pub fn stop(&mut self, timers: &mut impl Timers, entry: u32) {
        let timer = *timers.timer(entry);
        if !timer.is_running() {
            return;
        }
        let list = timer.list - 1;
        let head = self.lists[usize::from(list)];
        if head == entry {
            self.lists[usize::from(list)] = timer.next;
            if timer.next == NIL && list != DUE {
                self.occupied[usize::from(list) / 64] &= !(1 << (list % 64));
            }
        } else {
            timers.timer(timer.prev).next = timer.next;
        }
        if timer.next != NIL {
            timers.timer(timer.next).prev = timer.prev;
        } else if head != entry {
            timers.timer(head).prev = timer.prev;
        }
        timers.timer(entry).list = STOPPED;
    }

    /// The first tick after now at which a list has to be looked at.
    fn next_tick(&self) -> Option<i64> {
        (0..LEVELS)
            .filter(|level| self.occupied[*level] != 0)
            .map(|level| {
                let here = self.now >> (6 * level);
                let turned = self.occupied[level].rotate_right(((here + 1) & 63) as u32);
                (here + 1 + i64::from(turned.trailing_zeros())) << (6 * level)
            })
            .min()
    }

    /// Stops and returns one timer that is due at `now`, if there is any.
    pub fn pop_due(&mut self, timers: &mut impl Timers, now: i64) -> Option<u32> {
        let target = now.div_euclid(TICK);
        loop {
            let entry = self.lists[usize::from(DUE)];
            if entry != NIL {
                self.stop(timers, entry);
                return Some(entry);
            }
            match self.next_tick() {
                Some(tick) if tick <= target => {
                    self.now = tick;
                    self.cascade(timers);
                }
                _ => {
                    self.now = self.now.max(target);
                    return None;
                }
            }
        }
    }

    /// Moves what the slots that begin at `now` hold to where it belongs from here.
    fn cascade(&mut self, timers: &mut impl Timers) {
        for level in (0..LEVELS).rev() {
            if self.now & ((1 << (6 * level)) - 1) != 0 {
                continue;
            }
            let list = level * 64 + ((self.now >> (6 * level)) & 63) as usize;
            let mut entry = core::mem::replace(&mut self.lists[list], NIL);
            self.occupied[level] &= !(1 << (list % 64));
            while entry != NIL {
                let Timer { at, next, .. } = *timers.timer(entry);
                timers.timer(entry).list = STOPPED;
                self.start(timers, entry, at);
                entry = next;
            }
        }
    }

    /// When to look again, in microseconds: never later than the next timer,
    /// possibly earlier (a far one is approached in at most seven steps).
    pub fn next_look(&self) -> Option<i64> {
        if self.lists[usize::from(DUE)] != NIL {
            return Some(self.now * TICK);
        }
        self.next_tick().map(|tick| tick * TICK)
    }
}
