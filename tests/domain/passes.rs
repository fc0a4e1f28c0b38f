//! What the worker does, waiters, and acts that only touch queues.

use crate::domain::entities::*;
use crate::domain::undo::{Act, UndoLog};
use crate::truth::*;
use crate::world::*;

impl World {
    pub fn return_due(&mut self) {
        while self.memory.dispatcher().return_due(DB, self.now, 3) {}
        self.truth.return_due(self.now);
    }

    pub fn rotate(&mut self) {
        let busy = self.open.iter().any(|t| t.has(|a| matches!(a, Act::Rotate { .. })));
        let free = (0..YOUNG_SEGMENTS)
            .find(|s| self.truth.segments[usize::from(*s)].state == SegmentState::Free);
        let (false, Some(segment), Some(at)) = (busy, free, self.pick()) else { return };
        let tx = &mut self.open[at];
        let sub = tx.sub();
        let act = Act::Rotate { segment, since: self.now };
        self.memory.dispatcher().note(DB, sub, act, &mut tx.log);
        self.saw("rotate");
    }

    /// Under the lock of its leaves nobody else acts on the segment.
    pub fn truncate(&mut self) {
        let now = self.now;
        let mut d = self.memory.dispatcher();
        let segments = d.base(DB).segments;
        let found = segments
            .iter()
            .position(|s| s.state == SegmentState::Sealed && s.live == 0 && s.in_flight == 0);
        let Some(at) = found else { return };
        let generation = segments[at].generation + 1;
        let mut log = UndoLog::new();
        d.note(DB, 1, Act::Truncate { segment: at as u8, generation }, &mut log);
        d.settle(&log.entries()[0], now);
        let nobody = Names { queue: &|_| 0 };
        self.truth.commit(log.entries(), &nobody, now);
        self.saw("truncate");
    }

    pub fn waiter(&mut self) {
        let proc = self.dice.below(self.settings.sizes.waiters) as u32;
        let wide = self.dice.one_in(4);
        let some: Vec<u8> = (0..QUEUES as u8).filter(|_| self.dice.one_in(2)).collect();
        let choice = self.dice.below(4);
        let mut d = self.memory.dispatcher();
        let mut queues: Vec<u32> =
            some.iter().filter_map(|q| d.queue(DB, &queue_name(*q))).collect();
        if wide && !queues.is_empty() {
            queues = queues.iter().cycle().take(20).copied().collect();
        }
        match choice {
            0 => {
                let there = queues.iter().any(|q| d.claimable(*q) > 0);
                assert_eq!(d.start_wait(proc, DB, &queues), !there);
            }
            1 => {
                d.stop_wait(proc);
            }
            2 => {
                let stays = d.wake_up(proc);
                assert_eq!(d.waiters[proc as usize].waiting, stays);
            }
            _ => d.abandon_wait(proc),
        }
        d.wakes.clear();
    }

    pub fn note(&mut self) {
        let Some(at) = self.pick() else { return };
        let number = self.dice.below(QUEUES) as u8;
        let Some(queue) = self.ensure_queue(number) else { return };
        let act = match self.dice.below(4) {
            0 => Act::Pause { queue, paused: self.dice.one_in(3) },
            1 => Act::Configure { queue },
            _ => Act::Defer { queue, retryable: self.dice.one_in(2), count: 1, due: 5 },
        };
        let tx = &mut self.open[at];
        let sub = tx.sub();
        self.memory.dispatcher().note(DB, sub, act, &mut tx.log);
        self.truth.pins[usize::from(number)] += 1;
    }

    /// Ends are counted in the tables now and then, so that queues become idle.
    pub fn evict(&mut self) {
        let number = self.dice.below(QUEUES);
        let totals = &mut self.truth.totals[number];
        let gone = *totals;
        *totals = Counts::default();
        let mut d = self.memory.dispatcher();
        if let Some(queue) = d.queue(DB, &queue_name(number as u8)) {
            let counts = &mut d.queues[queue].counts;
            counts.scheduled -= gone.scheduled;
            counts.retryable -= gone.retryable;
            let Counts { completed, failed, cancelled, .. } = gone;
            let mut log = UndoLog::default();
            d.note(DB, 1, Act::Count { queue, completed, failed, cancelled }, &mut log);
            log.entries().iter().for_each(|entry| d.settle(entry, self.now));
        }
    }
}
