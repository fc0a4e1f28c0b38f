//! What rows in `attempt_state` say of open attempts; those that are parked, above all.
//!
//! A parked attempt is an open item of its claim like any other, but nobody works on it: the
//! passes for dead owners and for deadlines let it be, its own timer ends it.

use super::*;

impl Dispatcher<'_> {
    /// What the row says now. A change of care moves the counts and the timers.
    pub(super) fn set_mark(&mut self, at: u32, mut mark: Mark, now: i64) {
        let Item { db, claim, mark: before, deadline, period, .. } = self.items[at];
        let Claim { lane, runtime, .. } = self.claims[claim];
        let queue = self.lanes[lane].queue;
        let owned = runtime != NIL && !self.runtimes[runtime].dead;
        let resumed = before.is_parked() && !mark.is_parked();
        if before.care != Care::Claimer && mark.care == Care::Claimer && !owned {
            // Its owner may have gone since the row was written.
            mark.care = Care::Lease;
        }
        self.items[at].mark = mark;
        self.items[at].noted = true;
        let is_asked = |mark: &Mark| mark.asked && mark.care == Care::Claimer;
        if owned && is_asked(&mark) && !is_asked(&before) {
            self.tell_owner(runtime);
        }
        let wheel = &mut self.databases[usize::from(db)].callback_wheel;
        if mark.is_parked() {
            wheel.start(&mut self.items, at, mark.until);
            self.wake_worker_for(db, mark.until);
        } else {
            wheel.stop(&mut self.items, at);
        }
        let Queue { counts, settings, .. } = &mut self.queues[queue];
        let moved = i64::from(mark.is_parked()) - i64::from(before.is_parked());
        counts.running -= moved;
        counts.waiting_external += moved;
        let endless = mark.care == Care::Lease && deadline == i64::MAX;
        if !resumed && !endless {
            return;
        }
        let wait = match (period, settings.attempt_deadline) {
            (i64::MAX, _) if mark.care == Care::Claimer => i64::MAX,
            // Nothing else would end a lost attempt.
            (i64::MAX, wait) if wait <= 0 => QueueSettings::default().attempt_deadline,
            (i64::MAX, wait) => wait,
            (period, _) => period,
        };
        let deadline = now.saturating_add(wait);
        self.items[at].deadline = deadline;
        let timer = self.claims[claim].timer;
        if deadline < i64::MAX && (!timer.is_running() || deadline < timer.at) {
            self.schedule_claim(claim, deadline);
        }
    }

    /// What a committed row says of an open item that was restored.
    pub fn restore_mark(&mut self, db: Db, receipt: i64, mark: Mark, now: i64) {
        if let Some(at) = self.item(db, receipt) {
            self.set_mark(at, mark, now);
        }
    }

    /// One act of the transaction that has the item is settled.
    pub(super) fn unhold(&mut self, at: u32) {
        let item = &mut self.items[at];
        item.holds = item.holds.saturating_sub(1);
        item.closing = item.holds > 0;
        let Item { db, closing, claim, mark, .. } = *item;
        let Claim { segment, runtime, .. } = self.claims[claim];
        self.leave_segment(db, segment);
        let dead = runtime != NIL && self.runtimes[runtime].dead;
        if dead && !closing && mark.care == Care::Claimer {
            self.orphaned_something(db);
        }
    }

    /// A claim of a dead runtime none of whose open attempts is in its care does without it:
    /// however long they wait, they keep no place among the runtimes. Returns whether it was
    /// one.
    pub(super) fn let_go(&mut self, claim: u32) -> bool {
        let Claim { runtime, committed, items, .. } = self.claims[claim];
        let is_dead = runtime != NIL && self.runtimes[runtime].dead;
        let done =
            is_dead && committed && !self.any_item(items, |item| item.mark.care == Care::Claimer);
        if done {
            self.leave_runtime(claim);
        }
        done
    }

    /// As `let_go`; the runtime goes with its last claim.
    pub(super) fn let_go_of(&mut self, claim: u32) {
        let runtime = self.claims[claim].runtime;
        if self.let_go(claim) {
            self.forget_dead_runtime(runtime);
        }
    }

    /// The claim is a plain lease from here on.
    pub(super) fn leave_runtime(&mut self, claim: u32) {
        let Claim { runtime, prev, next, open, .. } = self.claims[claim];
        if prev == NIL {
            self.runtimes[runtime].claims = next;
        } else {
            self.claims[prev].next = next;
        }
        if next != NIL {
            self.claims[next].prev = prev;
        }
        self.runtimes[runtime].open -= open;
        let entry = &mut self.claims[claim];
        entry.runtime = NIL;
        entry.prev = NIL;
        entry.next = NIL;
    }

    /// Parked items whose callbacks have timed out. What a rescue fails to close, or an open
    /// transaction holds, comes up again after `again` microseconds.
    pub fn overdue(&mut self, db: Db, now: i64, limit: usize, again: i64, receipts: &mut Vec<i64>) {
        let later = now.saturating_add(again.max(1));
        while receipts.len() < limit {
            let wheel = &mut self.databases[usize::from(db)].callback_wheel;
            let Some(at) = wheel.pop_due(&mut self.items, now) else { return };
            let Item { closing, aside, receipt, mark, .. } = self.items[at];
            if !closing && aside <= now && mark.until <= now {
                receipts.push(receipt);
            }
            let next = if mark.until > now { mark.until } else { later.max(aside) };
            let wheel = &mut self.databases[usize::from(db)].callback_wheel;
            wheel.start(&mut self.items, at, next);
        }
    }
}
