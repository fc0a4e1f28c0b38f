//! Producers.

use crate::domain::dispatcher::*;
use crate::domain::undo::Act;
use crate::truth::*;
use crate::world::*;

impl World {
    pub fn ensure_queue(&mut self, number: u8) -> Option<u32> {
        let mut d = self.memory.dispatcher();
        let Ok(queue) = d.ensure_queue(DB, &queue_name(number)) else {
            self.saw("queues full");
            return None;
        };
        if !d.queues[queue].loaded {
            d.queues[queue].loaded = true;
            d.queues[queue].paused = self.truth.paused[usize::from(number)];
        }
        Some(queue)
    }

    pub fn add_lane(&mut self, key: Key) -> bool {
        let Some(queue) = self.ensure_queue(key.0) else { return false };
        let known = self.truth.lanes.get(&key).copied();
        let id = match known {
            Some(id) => id,
            None => loop {
                if let Some(id) = self.memory.dispatcher().take_number(DB) {
                    break id;
                }
                self.add_block();
            },
        };
        self.truth.ids.insert(id, key);
        let added = self.memory.dispatcher().add_lane(DB, queue, key.1, key.2, id, known.is_some());
        if added.is_err() {
            self.saw("lanes full");
        }
        added.is_ok()
    }

    pub fn add_block(&mut self) {
        let (first, count) = self.block();
        self.memory.dispatcher().add_block(DB, first, count);
    }

    pub fn enqueue(&mut self) {
        let Some(at) = self.pick() else { return };
        if self.truth.jobs.len() > self.settings.jobs {
            return;
        }
        let key = (
            self.dice.below(QUEUES) as u8,
            1 + self.dice.below(2) as u8,
            self.dice.below(10) as u8 / 9,
        );
        let mut want = match self.dice.below(30) {
            0 if self.settings.bulk => 1000 + self.dice.below(1200),
            1 if self.settings.bulk => 1024,
            2..6 => 20,
            _ => 1 + self.dice.below(4),
        };
        while want > 0 {
            let sub = self.open[at].sub();
            let tx = &mut self.open[at];
            let mut d = self.memory.dispatcher();
            let name = queue_name(key.0);
            let granted = d.enqueue(DB, &name, (key.1, key.2), want, self.now, &mut tx.log, sub);
            match granted {
                Ok(Granted::NeedsBlock) => self.add_block(),
                Ok(Granted::NeedsLane) => {
                    if !self.add_lane(key) {
                        return;
                    }
                }
                Ok(Granted::Some(grant)) => {
                    self.granted(at, key, grant);
                    want -= usize::from(grant.count);
                }
                Err(full) => {
                    assert_eq!(full, Full::Chunks);
                    self.saw("chunks full");
                    return;
                }
            }
        }
    }

    pub fn granted(&mut self, at: usize, key: Key, grant: Grant) {
        let Grant { chunk, first, count, segment, lane_id, write_lane } = grant;
        assert!(count > 0 && self.truth.ids[&lane_id] == key);
        assert_eq!(segment, self.truth.current);
        let row = self.truth.chunks.entry(chunk).or_insert(ChunkRow {
            key,
            segment,
            allocated: 0,
            in_flight: 0,
            touched: false,
        });
        assert_eq!((row.key, row.segment, row.allocated), (key, segment, first));
        row.allocated += count;
        row.in_flight += count;
        self.truth.in_flight[usize::from(segment)] += 1;
        assert!(write_lane || self.truth.lanes.contains_key(&key), "a lane without a row");
        if write_lane {
            let mut d = self.memory.dispatcher();
            let queue = d.queue(DB, &queue_name(key.0)).unwrap();
            let lane = d.lane(queue, key.1, key.2).unwrap();
            let tx = &mut self.open[at];
            let sub = tx.sub();
            d.note(DB, sub, Act::Lane { lane, id: lane_id }, &mut tx.log);
        }
    }
}
