//! Taking open items to close them.

use super::*;
use crate::domain::rescue::Kind;
use crate::domain::undo::{Act, End, Entry, UndoLog};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    pub item: u32,
    pub receipt: i64,
    pub position: i64,
    pub prior: i16,
    /// See `Item::keyed`.
    pub keyed: bool,
    /// See `Item::noted`.
    pub noted: bool,
    /// As the calling transaction has left it.
    pub mark: Mark,
    /// It belongs to a runtime that lives.
    pub owned: bool,
    /// The receipt of the first item of its claim; `receipt - claim` is its number in it.
    pub claim: i64,
    pub count: u32,
    pub segment: u8,
    pub lane: u32,
    pub lane_id: i64,
    pub queue: u32,
    pub priority: u8,
    /// Of the entry in the undo log, for `decide`.
    pub log: usize,
}

/// Who takes an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taker {
    /// The worker that has the receipt: refused when its runtime is dead, or the attempt is
    /// parked.
    Owner,
    /// The same about a callback: the attempt may be parked.
    Waiter,
    /// Somebody who acts whatever became of the owner.
    Operator,
    /// A rescue of attempts that somebody should work on.
    Lost,
    /// A rescue of attempts whose callbacks have timed out by now.
    Overdue(i64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    Taken(Taken),
    /// Not open, or not for this taker, or ended by this very transaction.
    Stale,
    /// Another transaction claims or closes it: wait for its end and ask again.
    Busy(u32),
}

impl Dispatcher<'_> {
    /// Takes an item for the calling transaction: open becomes closing. The log needs
    /// room for one entry.
    pub fn take(
        &mut self,
        db: Db,
        receipt: i64,
        xid: u32,
        subxact: u32,
        taker: Taker,
        log: &mut UndoLog,
    ) -> Take {
        let Some(at) = self.item(db, receipt) else { return Take::Stale };
        let item = self.items[at];
        let claim = self.claims[item.claim];
        if !claim.committed && claim.xid != xid {
            return Take::Busy(claim.xid);
        }
        let mut mark = item.mark;
        if item.closing {
            if item.closer != xid {
                return Take::Busy(item.closer);
            }
            match log.kept(db, receipt, mark, item.last) {
                Some(kept) => mark = kept,
                None => return Take::Stale,
            }
        }
        let has_runtime = claim.runtime != NIL;
        let is_dead = has_runtime && self.runtimes[claim.runtime].dead;
        let is_lost = is_dead && mark.care == Care::Claimer;
        let is_admitted = match taker {
            Taker::Owner => !is_lost && !mark.is_parked(),
            Taker::Waiter => !is_lost,
            Taker::Operator => true,
            Taker::Lost => !mark.is_parked(),
            Taker::Overdue(now) => mark.is_parked() && mark.until <= now,
        };
        if !is_admitted {
            return Take::Stale;
        }
        let generation = self.base(db).generation;
        let act = Act::Close { item: at, receipt, end: End::Undecided };
        let index = log.push(Entry { db, generation, subxact, act });
        let item = &mut self.items[at];
        // What this very transaction has written there, memory learns at its end.
        let noted = item.noted || item.closing;
        item.closer = xid;
        item.closing = true;
        item.holds += 1;
        item.last = u32::try_from(index).unwrap_or(u32::MAX);
        let Item { position, prior, keyed, .. } = *item;
        self.base(db).segments[usize::from(claim.segment)].in_flight += 1;
        self.changed(db, claim.segment);
        let lane = self.lanes[claim.lane];
        Take::Taken(Taken {
            item: at,
            receipt,
            position,
            prior,
            keyed,
            noted,
            mark,
            owned: has_runtime && !is_dead,
            claim: claim.first,
            count: claim.count,
            segment: claim.segment,
            lane: claim.lane,
            lane_id: lane.id,
            queue: lane.queue,
            priority: lane.priority,
            log: index,
        })
    }

    /// The queue of an open item.
    pub fn queue_of(&self, db: Db, receipt: i64) -> Option<u32> {
        let item = self.item(db, receipt)?;
        let lane = self.claims[self.items[item].claim].lane;
        Some(self.lanes[lane].queue)
    }

    /// Moves the deadline of an open item. Who has written about the attempt may do it before
    /// the end of the transaction.
    ///
    /// * `xid` - of the calling transaction; 0: it has none
    pub fn extend(
        &mut self,
        db: Db,
        receipt: i64,
        (by, now): (i64, i64),
        xid: u32,
        log: &UndoLog,
    ) -> Result<i64, Take> {
        let at = self.item(db, receipt).ok_or(Take::Stale)?;
        let item = self.items[at];
        let claim = self.claims[item.claim];
        if !claim.committed && claim.xid != xid {
            return Err(Take::Busy(claim.xid));
        }
        let mut mark = item.mark;
        if item.closing {
            if item.closer != xid {
                return Err(Take::Busy(item.closer));
            }
            mark = log.kept(db, receipt, mark, item.last).ok_or(Take::Stale)?;
        }
        let is_dead = claim.runtime != NIL && self.runtimes[claim.runtime].dead;
        let is_parked = item.mark.is_parked() || mark.is_parked();
        if is_parked || (is_dead && mark.care == Care::Claimer) {
            return Err(Take::Stale);
        }
        if item.deadline != i64::MAX {
            // The claim's timer is left where it is: it looks at the items when it fires.
            self.items[at].deadline = item.deadline.max(now).saturating_add(by);
        }
        Ok(self.items[at].deadline)
    }

    /// Open items of dead runtimes, for the owner pass. False in `orphans` afterwards
    /// means that none is left but those an open transaction holds. When all that are left
    /// were set aside, the pass rests until the first of them may be looked at.
    pub fn orphaned(&mut self, db: Db, now: i64, limit: usize, receipts: &mut Vec<i64>) {
        let (mut from, mut aside) = (0, i64::MAX);
        while let Some(at) = self.runtimes.next_used(from) {
            from = at + 1;
            let runtime = self.runtimes[at];
            if runtime.db != db || !runtime.dead {
                continue;
            }
            let mut claim = runtime.claims;
            while claim != NIL {
                if self.claims[claim].committed {
                    let mut item = self.claims[claim].items;
                    while item != NIL {
                        if receipts.len() >= limit {
                            return;
                        }
                        let Item { receipt, closing, aside: until, mark, .. } = self.items[item];
                        let is_lost = !closing && mark.care == Care::Claimer;
                        if is_lost && until <= now {
                            receipts.push(receipt);
                        } else if is_lost {
                            aside = aside.min(until);
                        }
                        item = self.items[item].next;
                    }
                }
                claim = self.claims[claim].next;
            }
        }
        if receipts.is_empty() {
            let database = self.base(db);
            database.orphans = aside < i64::MAX;
            if database.orphans {
                database.rescues[Kind::Owner as usize].rest = aside;
            }
        }
    }

    /// Open attempts of dead runtimes.
    pub fn count_orphans(&self, db: Db) -> u64 {
        let mut count = 0;
        for at in self.runtimes.indexes() {
            let Runtime { db: of, dead, mut claims, .. } = self.runtimes[at];
            while of == db && dead && claims != NIL {
                let Claim { items, next, .. } = self.claims[claims];
                count += self.count_items(items, |item| item.mark.care == Care::Claimer);
                claims = next;
            }
        }
        count
    }

    /// No rescue of the item before `until`: it cannot be closed, and would stop the others.
    pub fn set_aside(&mut self, db: Db, receipt: i64, until: i64) {
        if let Some(at) = self.item(db, receipt) {
            self.items[at].aside = until;
        }
    }

    /// When the oldest attempt was claimed that a rescue of this kind has still to close.
    pub fn oldest_lost(
        &self,
        db: Db,
        kind: Kind,
        now: i64,
        from: u32,
    ) -> (Option<i64>, Option<u32>) {
        const STEPS: u32 = 4096;
        let (mut at, mut oldest) = (from, None);
        while let Some(claim) = self.claims.next_used(at) {
            if claim >= from + STEPS {
                return (oldest, Some(claim));
            }
            at = claim + 1;
            let Claim { db: of, committed, claimed_at, runtime, items, .. } = self.claims[claim];
            if of != db || !committed {
                continue;
            }
            let lost = match kind {
                Kind::Owner => {
                    let is_dead = runtime != NIL && self.runtimes[runtime].dead;
                    is_dead && self.any_item(items, |item| item.mark.care == Care::Claimer)
                }
                Kind::Deadline => self.any_item(items, |item| item.has_expired(now)),
                Kind::Callback => {
                    self.any_item(items, |i| i.mark.is_parked() && i.mark.until <= now)
                }
            };
            if lost && oldest.is_none_or(|known| claimed_at < known) {
                oldest = Some(claimed_at);
            }
        }
        (oldest, None)
    }

    /// Whether one of the open items from this one on is like that.
    pub(super) fn any_item(&self, mut item: u32, is_it: impl Fn(&Item) -> bool) -> bool {
        while item != NIL {
            if is_it(&self.items[item]) {
                return true;
            }
            item = self.items[item].next;
        }
        false
    }

    pub(super) fn count_items(&self, mut item: u32, is_it: impl Fn(&Item) -> bool) -> u64 {
        let mut count = 0;
        while item != NIL {
            count += u64::from(is_it(&self.items[item]));
            item = self.items[item].next;
        }
        count
    }

    /// Open items whose deadline passed, for the deadline pass. What a rescue fails to
    /// close, or an open transaction holds, comes up again after `again` microseconds.
    pub fn expired(&mut self, db: Db, now: i64, limit: usize, again: i64, receipts: &mut Vec<i64>) {
        // A time that is not ahead would come up in this very loop.
        let later = now.saturating_add(again.max(1));
        while receipts.len() < limit {
            let wheel = &mut self.databases[usize::from(db)].claim_wheel;
            let Some(claim) = wheel.pop_due(&mut self.claims, now) else { return };
            let (mut next, mut item) = (i64::MAX, self.claims[claim].items);
            let committed = self.claims[claim].committed;
            while item != NIL {
                let Item { deadline, closing, receipt, mark, .. } = self.items[item];
                if mark.is_parked() {
                    // It gets another deadline when it is resumed.
                } else if deadline > now {
                    next = next.min(deadline);
                } else {
                    if committed && !closing && self.items[item].aside <= now {
                        if receipts.len() >= limit {
                            // The rest of this claim is the next batch's, and that is now: a
                            // timer set to `now` would be up a tick later, and end the pass.
                            next = 0;
                            break;
                        }
                        receipts.push(receipt);
                        // Out of the next batch's way: else the same items, if they cannot be
                        // closed, would fill each batch and hide the rest.
                        self.items[item].deadline = later;
                    }
                    next = next.min(later);
                }
                item = self.items[item].next;
            }
            self.schedule_claim(claim, next);
        }
    }
}
