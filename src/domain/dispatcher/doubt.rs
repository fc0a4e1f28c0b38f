//! Acts of transactions that are prepared, or were open while memory was rebuilt.

use super::*;
use crate::domain::undo::Entry;

impl Dispatcher<'_> {
    /// Keeps the acts of a transaction whose end its backend will not report. False, and
    /// nothing kept, when there is no room.
    pub fn keep_doubts(&mut self, xid: u32, entries: &[Entry]) -> bool {
        if self.doubts.free() < entries.len() {
            return false;
        }
        let mut order = self.doubts_of(xid);
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
        true
    }

    /// Forgets the doubts of a transaction whose own backend undoes its acts after all.
    pub fn drop_doubts(&mut self, xid: u32) {
        self.doubts.remove_where(|d| d.xid == xid);
    }

    /// Some transaction whose acts are in doubt, and where to go on from.
    pub fn next_doubt(&self, from: u32) -> Option<(u32, u32)> {
        self.doubts.next_used(from).map(|at| (at + 1, self.doubts[at].xid))
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
