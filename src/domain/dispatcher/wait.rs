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
        for queue in queues {
            self.queues[*queue].waiters += 1;
        }
        let [first, last] = *self.waiting;
        let waiter = &mut self.waiters[proc as usize];
        waiter.waiting = true;
        waiter.woken = false;
        waiter.db = db;
        waiter.count = queues.len() as u16;
        for (place, queue) in waiter.queues.iter_mut().zip(queues) {
            *place = *queue;
        }
        waiter.prev = last;
        waiter.next = NIL;
        *self.waiting = [if first == NIL { proc } else { first }, proc];
        if last != NIL {
            self.waiters[last as usize].next = proc;
        }
        true
    }

    /// Ends a wait. True when it was woken, so that jobs may be there.
    pub fn stop_wait(&mut self, proc: u32) -> bool {
        let Waiter { waiting, woken, count, queues, prev, next, .. } = self.waiters[proc as usize];
        if !waiting {
            return false;
        }
        self.waiters[proc as usize].waiting = false;
        for queue in &queues[..usize::from(count).min(WAITED_QUEUES)] {
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

    /// A waiter leaves without a job (it was cancelled, or its client is gone): whoever
    /// comes next is woken in its place.
    pub fn abandon_wait(&mut self, proc: u32) {
        let Waiter { count, queues, .. } = self.waiters[proc as usize];
        if self.stop_wait(proc) {
            for queue in &queues[..usize::from(count).min(WAITED_QUEUES)] {
                let jobs = self.claimable(*queue).min(1);
                self.wake(*queue, jobs);
            }
        }
    }

    /// Wakes as many waiters of the queue as there are new jobs, longest wait first.
    pub fn wake(&mut self, queue: u32, mut jobs: u64) {
        if self.queues[queue].waiters == 0 || self.queues[queue].paused {
            return;
        }
        let mut at = self.waiting[0];
        while at != NIL && jobs > 0 && !self.wakes.is_full() {
            let waiter = &mut self.waiters[at as usize];
            let queues = &waiter.queues[..usize::from(waiter.count).min(WAITED_QUEUES)];
            if !waiter.woken && queues.contains(&queue) {
                waiter.woken = true;
                self.wakes.push(at);
                jobs -= 1;
            }
            at = self.waiters[at as usize].next;
        }
    }
}
