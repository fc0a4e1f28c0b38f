//! Acts of transactions that are prepared, or were open while memory was rebuilt.

use super::*;
use crate::domain::undo::Entry;

impl Dispatcher<'_> {
    /// Keeps the acts of a transaction whose end its backend will not report. Returns what
    /// `drop_doubts` wants; None, and nothing kept, when there is no room.
    pub fn keep_doubts(&mut self, xid: u32, entries: &[Entry]) -> Option<u32> {
        if self.doubts.free() < entries.len() {
            return None;
        }
        let first = self.doubts_of(xid);
        let mut order = first;
        for entry in entries {
            let Entry { db, generation, act, .. } = *entry;
            // Replay restored those of an earlier generation.
            if self.base(db).generation == generation || !act.is_rebuilt() {
                self.doubts.insert(Doubt { db, xid, order, act });
                order += 1;
            } else {
                self.unpin(db, act);
            }
        }
        Some(first)
    }

    /// Forgets what `keep_doubts` kept: its own backend undoes these acts after all. Those
    /// that a replay restored are not in its hands.
    pub fn drop_doubts(&mut self, xid: u32, first: u32) {
        self.doubts.remove_where(|d| d.xid == xid && d.order >= first);
    }

    /// Forgets the doubts of a database that a replay finds in the tables. The others (of a
    /// prepared pause, say) stay and are numbered anew.
    pub(super) fn forget_rebuilt_doubts(&mut self, db: Db) {
        let mut from = 0;
        while let Some(at) = self.doubts.next_used(from) {
            from = at + 1;
            let Doubt { xid, order, .. } = self.doubts[at];
            if self.doubts[at].db != db || order != 0 {
                continue;
            }
            let mut kept = 0;
            for order in 0..self.doubts_of(xid) {
                let Some(at) = self.doubt(xid, order) else { continue };
                let doubt = self.doubts[at];
                if doubt.act.is_rebuilt() {
                    self.unpin(db, doubt.act);
                    self.doubts.remove(at);
                    continue;
                }
                if kept < order {
                    self.doubts.remove(at);
                    self.doubts.insert(Doubt { order: kept, ..doubt });
                }
                kept += 1;
            }
        }
    }

    /// Some transaction whose acts are in doubt, and where to go on from. Those of a database
    /// that is being replayed have to wait: what they act on may not be there yet.
    pub fn next_doubt(&self, mut from: u32) -> Option<(u32, u32)> {
        while let Some(at) = self.doubts.next_used(from) {
            from = at + 1;
            // Once for each transaction.
            let Doubt { db, xid, order, .. } = self.doubts[at];
            if order == 0 && self.databases[usize::from(db)].phase == Phase::Open {
                return Some((from, xid));
            }
        }
        None
    }

    /// The transaction ended: its doubts become facts, in the order of its acts or
    /// against it.
    pub fn settle_doubts(&mut self, xid: u32, committed: bool, now: i64) {
        let count = self.doubts_of(xid);
        for step in 0..count {
            let order = if committed { step } else { count - 1 - step };
            let Some(at) = self.doubt(xid, order) else { continue };
            let Doubt { db, act, .. } = self.doubts[at];
            self.doubts.remove(at);
            if committed {
                self.commit_act(db, act, now);
            } else {
                self.abort_act(db, act, now);
            }
        }
    }

    fn doubt(&self, xid: u32, order: u32) -> Option<u32> {
        self.doubts.find(Doubt::key(xid, order), |d| d.xid == xid && d.order == order)
    }

    /// How many acts of a transaction are in doubt. They are numbered without a gap, so
    /// doubling and halving finds the end in a few look-ups.
    pub(super) fn doubts_of(&self, xid: u32) -> u32 {
        let mut step = 1;
        while self.doubt(xid, step - 1).is_some() {
            step *= 2;
        }
        // All below `known` exist; `step - 1` does not.
        let (mut known, mut unknown) = (step / 2, step - 1);
        while known < unknown {
            let middle = known + (unknown - known) / 2;
            if self.doubt(xid, middle).is_some() {
                known = middle + 1;
            } else {
                unknown = middle;
            }
        }
        known
    }
}
