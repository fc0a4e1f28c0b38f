//! Backends that wait for jobs.

use super::*;

const WAKES: usize = 256;

/// Proc numbers whose latches are set once the lock is released.
#[repr(C)]
pub struct Wakes {
    count: usize,
    procs: [u32; WAKES],
}

impl Default for Wakes {
    fn default() -> Self {
        Self::new()
    }
}

impl Wakes {
    pub const fn new() -> Self {
        Self { count: 0, procs: [0; WAKES] }
    }

    /// Whoever does not fit is found by the look each waiter takes every second.
    pub fn push(&mut self, proc: u32) {
        if self.count < WAKES && !self.procs[..self.count].contains(&proc) {
            self.procs[self.count] = proc;
            self.count += 1;
        }
    }

    pub fn is_full(&self) -> bool {
        self.count == WAKES
    }

    pub fn as_slice(&self) -> &[u32] {
        &self.procs[..self.count]
    }

    pub fn clear(&mut self) {
        self.count = 0;
    }
}

impl Dispatcher<'_> {
    /// Begins to wait. False, and nothing done, when a job is there already.
    pub fn start_wait(&mut self, proc: u32, db: Db, queues: &[u32]) -> bool {
        if queues.iter().any(|q| self.claimable(*q) > 0) {
            return false;
        }
        self.stop_wait(proc);
        let [first, last] = *self.waiting;
        let count = queues.len().min(WAITED_QUEUES + 1) as u16;
        let mut waiter =
            Waiter { waiting: true, db, count, prev: last, next: NIL, ..Default::default() };
        for (place, queue) in waiter.queues.iter_mut().zip(queues) {
            *place = *queue;
        }
        self.waiters[proc as usize] = waiter;
        if waiter.is_wide() {
            self.base(db).wide_waiters += 1;
        }
        for queue in waiter.named() {
            self.queues[*queue].waiters += 1;
        }
        *self.waiting = [if first == NIL { proc } else { first }, proc];
        if last != NIL {
            self.waiters[last as usize].next = proc;
        }
        true
    }

    /// The wait that has begun is for these runtimes too: the one named, and those that the
    /// backend registered. True when an attempt of theirs was asked to stop and nobody has been
    /// told since.
    pub fn wait_as(&mut self, proc: u32, pid: i32, runtime: Option<[u8; 16]>) -> bool {
        let waiter = &mut self.waiters[proc as usize];
        waiter.pid = pid;
        waiter.runtime = runtime.unwrap_or_default();
        let (db, waiter) = (waiter.db, *waiter);
        if !self.base(db).owners_asked {
            return false;
        }
        let (mut told, mut others, mut from) = (false, false, 0);
        while let Some(at) = self.runtimes.next_used(from) {
            from = at + 1;
            if self.runtimes[at].db != db || !self.runtimes[at].asked {
                continue;
            }
            // It may have ended since.
            let is_asked = self.has_asked(at);
            let runtime = &mut self.runtimes[at];
            if !is_asked {
                runtime.asked = false;
            } else if waiter.is_of(proc, runtime) {
                runtime.asked = false;
                told = true;
            } else {
                others = true;
            }
        }
        self.base(db).owners_asked = others;
        told
    }

    /// An attempt of the runtime was asked to stop: every wait of its owner ends, or the next
    /// one that begins.
    pub(super) fn tell_owner(&mut self, at: u32) {
        let owner = self.runtimes[at];
        let (mut told, mut proc) = (false, self.waiting[0]);
        while proc != NIL {
            let waiter = &mut self.waiters[proc as usize];
            if waiter.db == owner.db && waiter.is_of(proc, &owner) {
                waiter.asked = true;
                told = true;
                self.wakes.push(proc);
            }
            proc = self.waiters[proc as usize].next;
        }
        if !told {
            self.runtimes[at].asked = true;
            self.base(owner.db).owners_asked = true;
        }
    }

    /// Ends a wait. True when it was woken, so that jobs may be there.
    pub fn stop_wait(&mut self, proc: u32) -> bool {
        let waiter = self.waiters[proc as usize];
        if !waiter.waiting {
            return false;
        }
        let Waiter { db, woken, prev, next, .. } = waiter;
        self.waiters[proc as usize].waiting = false;
        if waiter.is_wide() {
            self.base(db).wide_waiters -= 1;
        }
        for queue in waiter.named() {
            self.queues[*queue].waiters -= 1;
        }
        if prev == NIL {
            self.waiting[0] = next;
        } else {
            self.waiters[prev as usize].next = next;
        }
        if next == NIL {
            self.waiting[1] = prev;
        } else {
            self.waiters[next as usize].prev = prev;
        }
        woken
    }

    /// The sleep is over. Who was woken stays, for he owes it to the others to take the job:
    /// what ends before that is `abandon_wait`. Who was not has nothing more to wait for.
    pub fn wake_up(&mut self, proc: u32) -> bool {
        let Waiter { waiting, woken, .. } = self.waiters[proc as usize];
        (waiting && woken) || self.stop_wait(proc)
    }

    /// A waiter leaves without a job (it was cancelled, or its client is gone): whoever
    /// comes next is woken in its place.
    pub fn abandon_wait(&mut self, proc: u32) {
        let waiter = self.waiters[proc as usize];
        if !self.stop_wait(proc) {
            return;
        }
        for queue in waiter.named() {
            self.pass_on(*queue);
        }
        let mut from = if waiter.is_wide() { 0 } else { NIL };
        while let Some(queue) = self.queues.next_used(from) {
            from = queue + 1;
            if self.queues[queue].db == waiter.db {
                self.pass_on(queue);
            }
        }
    }

    fn pass_on(&mut self, queue: u32) {
        let jobs = self.claimable(queue).min(1);
        self.wake(queue, jobs);
    }

    /// The database goes: its waiters wake and find nothing, and name its queues no more.
    pub(super) fn dismiss_waiters(&mut self, db: Db) {
        let mut at = self.waiting[0];
        while at != NIL {
            let Waiter { db: of, next, .. } = self.waiters[at as usize];
            if of == db {
                self.stop_wait(at);
                self.wakes.push(at);
            }
            at = next;
        }
    }

    /// Wakes as many waiters of the queue as there are new jobs, longest wait first.
    pub fn wake(&mut self, queue: u32, mut jobs: u64) {
        let Queue { db, waiters, paused, .. } = self.queues[queue];
        if paused || (waiters == 0 && self.base(db).wide_waiters == 0) {
            return;
        }
        let mut at = self.waiting[0];
        while at != NIL && jobs > 0 && !self.wakes.is_full() {
            let waiter = &mut self.waiters[at as usize];
            let waits = waiter.db == db && (waiter.is_wide() || waiter.named().contains(&queue));
            if !waiter.woken && waits {
                waiter.woken = true;
                self.wakes.push(at);
                jobs -= 1;
            }
            at = self.waiters[at as usize].next;
        }
    }
}
