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
    /// See `Item::asked`.
    pub asked: bool,
    /// See `Item::noted`.
    pub noted: bool,
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

/// Where an attempt is that a transaction says something about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noted {
    pub segment: u8,
    pub position: i64,
    pub queue: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Take {
    Taken(Taken),
    /// Not open, or its owner was declared dead, or taken by this very transaction.
    Stale,
    /// Another transaction claims or closes it: wait for its end and ask again.
    Busy(u32),
}

impl Dispatcher<'_> {
    /// Takes an item for the calling transaction: open becomes closing. The log needs
    /// room for one entry.
    ///
    /// * `for_owner` - the owner acts: refused when its runtime is dead. Rescue acts
    ///   whatever became of the owner.
    pub fn take(
        &mut self,
        db: Db,
        receipt: i64,
        xid: u32,
        subxact: u32,
        for_owner: bool,
        log: &mut UndoLog,
    ) -> Take {
        let Some(at) = self.item(db, receipt) else { return Take::Stale };
        let item = self.items[at];
        let claim = self.claims[item.claim];
        if !claim.committed && claim.xid != xid {
            return Take::Busy(claim.xid);
        }
        if item.closing {
            return if item.closer == xid { Take::Stale } else { Take::Busy(item.closer) };
        }
        if for_owner && claim.runtime != NIL && self.runtimes[claim.runtime].dead {
            return Take::Stale;
        }
        if item.noter != 0 && item.noter != xid {
            return Take::Busy(item.noter);
        }
        let generation = self.base(db).generation;
        let act = Act::Close { item: at, receipt, end: End::Undecided };
        let index = log.push(Entry { db, generation, subxact, act });
        let item = &mut self.items[at];
        item.closer = xid;
        item.closing = true;
        let Item { position, prior, keyed, asked, noted, .. } = *item;
        self.base(db).segments[usize::from(claim.segment)].in_flight += 1;
        self.changed(db, claim.segment);
        let lane = self.lanes[claim.lane];
        Take::Taken(Taken {
            item: at,
            receipt,
            position,
            prior,
            keyed,
            asked,
            noted,
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

    /// The calling transaction will write a row about an open attempt: nobody else closes it
    /// or writes there before it has ended. Refused as `take` refuses an owner.
    pub fn note_item(&mut self, db: Db, receipt: i64, xid: u32) -> Result<Noted, Take> {
        let at = self.item(db, receipt).ok_or(Take::Stale)?;
        let item = self.items[at];
        let claim = self.claims[item.claim];
        if !claim.committed && claim.xid != xid {
            return Err(Take::Busy(claim.xid));
        }
        if item.closing {
            return Err(if item.closer == xid { Take::Stale } else { Take::Busy(item.closer) });
        }
        if claim.runtime != NIL && self.runtimes[claim.runtime].dead {
            return Err(Take::Stale);
        }
        if item.noter != 0 && item.noter != xid {
            return Err(Take::Busy(item.noter));
        }
        let item = &mut self.items[at];
        item.noted = true;
        item.noter = xid;
        let position = item.position;
        Ok(Noted { segment: claim.segment, position, queue: self.lanes[claim.lane].queue })
    }

    /// The transaction has ended, however.
    pub fn end_note(&mut self, db: Db, receipt: i64, xid: u32) {
        if let Some(at) = self.item(db, receipt)
            && self.items[at].noter == xid
        {
            self.items[at].noter = 0;
        }
    }

    /// The queue of an open item.
    pub fn queue_of(&self, db: Db, receipt: i64) -> Option<u32> {
        let item = self.item(db, receipt)?;
        let lane = self.claims[self.items[item].claim].lane;
        Some(self.lanes[lane].queue)
    }

    /// Moves the deadlines of open items; None where the receipt is not open (or its owner is dead).
    pub fn extend(&mut self, db: Db, receipt: i64, by: i64, now: i64) -> Result<i64, Take> {
        let at = self.item(db, receipt).ok_or(Take::Stale)?;
        let item = self.items[at];
        let claim = self.claims[item.claim];
        if !claim.committed {
            return Err(Take::Busy(claim.xid));
        }
        if item.closing {
            return Err(Take::Busy(item.closer));
        }
        if claim.runtime != NIL && self.runtimes[claim.runtime].dead {
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
                        let entry = &self.items[item];
                        if !entry.closing && entry.aside <= now {
                            receipts.push(entry.receipt);
                        } else if !entry.closing {
                            aside = aside.min(entry.aside);
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
        let runtimes = self.runtimes.indexes().map(|at| &self.runtimes[at]);
        runtimes.filter(|r| r.db == db && r.dead).map(|r| u64::from(r.open)).sum()
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
                Kind::Owner => runtime != NIL && self.runtimes[runtime].dead,
                Kind::Deadline => self.has_expired(items, now),
                Kind::Callback => false,
            };
            if lost && oldest.is_none_or(|known| claimed_at < known) {
                oldest = Some(claimed_at);
            }
        }
        (oldest, None)
    }

    fn has_expired(&self, mut item: u32, now: i64) -> bool {
        while item != NIL {
            if self.items[item].deadline <= now {
                return true;
            }
            item = self.items[item].next;
        }
        false
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
                let Item { deadline, closing, receipt, .. } = self.items[item];
                if deadline > now {
                    next = next.min(deadline);
                } else {
                    if committed && !closing && self.items[item].aside <= now {
                        if receipts.len() >= limit {
                            // The rest of this claim is the next batch's.
                            next = now;
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
