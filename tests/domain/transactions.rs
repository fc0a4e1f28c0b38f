//! Transactions: savepoints, ends, two-phase commit.

use std::collections::BTreeMap;

use crate::domain::entities::*;
use crate::domain::undo::{Act, End, Entry, UndoLog};
use crate::truth::*;
use crate::world::*;

impl World {
    pub fn begin(&mut self) {
        if self.open.len() >= self.settings.open {
            return;
        }
        let xid = self.xid();
        let subs = vec![Sub { id: 1, xids: vec![xid] }];
        self.open.push(Tx { xid, log: UndoLog::new(), subs, next_sub: 2, release: None });
    }

    pub fn pick(&mut self) -> Option<usize> {
        if self.open.is_empty() {
            self.begin();
        }
        (!self.open.is_empty()).then(|| self.dice.below(self.open.len()))
    }

    pub fn savepoint(&mut self) {
        let Some(at) = self.pick() else { return };
        let xid = self.xid();
        let tx = &mut self.open[at];
        tx.subs.push(Sub { id: tx.next_sub, xids: vec![xid] });
        tx.next_sub += 1;
    }

    pub fn end_savepoint(&mut self) {
        let Some(at) = self.pick() else { return };
        if self.open[at].subs.len() == 1 {
            return;
        }
        if self.dice.one_in(2) {
            self.saw("savepoint released");
            let tx = &mut self.open[at];
            let Sub { id, xids } = tx.subs.pop().unwrap();
            let parent = tx.subs.last_mut().unwrap();
            parent.xids.extend(xids);
            tx.log.relabel(id, parent.id);
            return;
        }
        self.saw("savepoint rolled back");
        // Possibly several levels at once.
        let keep = 1 + self.dice.below(self.open[at].subs.len() - 1);
        let from = self.open[at].subs[keep].id;
        let mut ended = Vec::new();
        let mut undone = Vec::new();
        while let Some(entry) = self.open[at].log.pop_from(from) {
            self.memory.dispatcher().undo(&entry, self.now);
            undone.push(entry);
        }
        for sub in self.open[at].subs.drain(keep..) {
            ended.extend(sub.xids);
        }
        self.open[at].release = None;
        self.undone(&undone, &ended);
    }

    /// Memory has undone what it could by the log; the rest goes by xid.
    fn undone(&mut self, entries: &[Entry], xids: &[u32]) {
        let names = self.names();
        self.settle_doubts(xids, false);
        for entry in entries {
            self.truth_abort(entry.act, &names);
        }
    }

    pub fn truth_abort(&mut self, act: Act, names: &BTreeMap<u32, u8>) {
        let d = self.memory.dispatcher();
        let in_chunk = |position| {
            let (number, offset) = split(position);
            d.chunk(DB, number).is_some_and(|at| d.chunks[at].bits.contains(offset))
        };
        let names = Names { queue: &|at| names[&at] };
        self.truth.abort(act, &names, self.now, &in_chunk);
    }

    /// Queues by their index.
    pub fn names(&mut self) -> BTreeMap<u32, u8> {
        let d = self.memory.dispatcher();
        d.queues.indexes().map(|at| (at, d.queues[at].name()[1..].parse().unwrap())).collect()
    }

    pub fn settle_doubts(&mut self, xids: &[u32], committed: bool) {
        let mut d = self.memory.dispatcher();
        for xid in xids {
            d.settle_doubts(*xid, committed, self.now);
        }
        d.base(DB).doubts_due = false;
    }

    pub fn end(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let at = self.dice.below(self.open.len());
        if self.dice.one_in(4) { self.abort(at) } else { self.commit(at) }
    }

    pub fn commit(&mut self, at: usize) {
        self.saw("commit");
        let tx = self.open.swap_remove(at);
        let names = self.names();
        let xids: Vec<u32> = tx.subs.iter().flat_map(|s| s.xids.iter().copied()).collect();
        // What a rebuild made doubts of came before the rest of the log.
        self.settle_doubts(&xids, true);
        let mut d = self.memory.dispatcher();
        for entry in tx.log.entries().iter().filter(|e| !e.act.is_farewell()) {
            d.settle(entry, self.now);
        }
        let mut d = self.memory.dispatcher();
        d.base(DB).doubts_due = false;
        for entry in tx.log.entries().iter().filter(|e| e.act.is_farewell()) {
            d.settle(entry, self.now);
        }
        let names = Names { queue: &|at| names[&at] };
        self.truth.commit(tx.log.entries(), &names, self.now);
    }

    pub fn abort(&mut self, at: usize) {
        self.saw("abort");
        let mut tx = self.open.swap_remove(at);
        let mut undone = Vec::new();
        while let Some(entry) = tx.log.pop() {
            self.memory.dispatcher().undo(&entry, self.now);
            undone.push(entry);
        }
        let xids: Vec<u32> = tx.subs.iter().flat_map(|s| s.xids.iter().copied()).collect();
        self.undone(&undone, &xids);
    }

    pub fn prepare(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let at = self.dice.below(self.open.len());
        if self.open[at].has(|act| !act.may_be_prepared()) {
            return;
        }
        // Doubts of subtransactions are settled one by one, and marks in no other order.
        let generation = self.memory.dispatcher().base(DB).generation;
        let outlived = |e: &Entry| {
            e.generation != generation && matches!(e.act, Act::Close { end: End::Kept(_), .. })
        };
        if self.open[at].log.entries().iter().any(outlived) {
            return;
        }
        let (xid, entries) = (self.open[at].xid, self.open[at].log.entries().to_vec());
        if self.memory.dispatcher().keep_doubts(xid, &entries).is_none() {
            self.saw("doubts full");
            return;
        }
        self.saw("prepare");
        let tx = self.open.swap_remove(at);
        let xids = tx.subs.into_iter().flat_map(|s| s.xids).collect();
        self.prepared.push(Prepared { xids, entries });
    }

    pub fn settle_prepared(&mut self) {
        if self.prepared.is_empty() {
            return;
        }
        let at = self.dice.below(self.prepared.len());
        let committed = self.dice.one_in(2);
        self.end_prepared(at, committed);
    }

    pub fn end_prepared(&mut self, at: usize, committed: bool) {
        let names = self.names();
        let Prepared { xids, entries } = self.prepared.swap_remove(at);
        self.settle_doubts(&xids, committed);
        if committed {
            let names = Names { queue: &|at| names[&at] };
            self.truth.commit(&entries, &names, self.now);
        } else {
            for entry in entries.iter().rev() {
                self.truth_abort(entry.act, &names);
            }
        }
    }
}
