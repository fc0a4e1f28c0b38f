//! Who serves which database: the table that the launcher, the workers and the
//! sessions that drop or rename databases share.
//!
//! It lies in shared memory and is only ever touched under its lock (see
//! `shared.rs`), so it is plain data, and zeroed memory is a valid empty registry.
//! The state machine is drawn in README.md.

/// Slots beyond `awa.max_databases`, so that databases can be probed for the
/// extension while every one that may be served is served.
pub const PROBES: usize = 4;

/// Wake-ups noted one by one; when more come at once everything is looked at again.
const REQUESTS: usize = 32;

/// No process has this number.
const NOBODY: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum State {
    /// The slot is unused.
    Free = 0,
    /// Asked of the postmaster; not connected yet.
    Starting,
    /// Connected, and the extension is there.
    Running,
    /// Told to end.
    Stopping,
    /// Ended: the extension is not there.
    Absent,
    /// Ended because it was told to, or because the extension was made anew.
    Left,
    /// Ended for any other reason.
    Failed,
}

impl State {
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Absent | Self::Left | Self::Failed)
    }
}

/// A process to wake or to signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pub pid: i32,
    /// Its number in the array of processes, for its latch.
    pub number: u32,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Header {
    launcher_pid: i32,
    launcher_number: u32,
    generation: u32,
    request_count: u32,
    requests: [u32; REQUESTS],
    /// More requests than fit: look at every database again.
    recheck_all: bool,
    /// A prepared transaction made or dropped an extension.
    prepared: bool,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Entry {
    pub db: u32,
    /// Tells the worker the launcher means from a late one of an earlier start.
    pub generation: u32,
    pub pid: i32,
    number: u32,
    /// Sessions that need the database without a worker.
    pub holds: u32,
    /// When the worker connected, in microseconds of the server's clock.
    pub started_at: i64,
    pub state: State,
    /// What `state` becomes when the worker has ended.
    ending: State,
    /// The extension may have come since the worker looked.
    pub recheck: bool,
    /// Something became due sooner than the worker knew.
    woken: bool,
}

/// What the launcher was asked to look at again.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Requests {
    pub databases: Vec<u32>,
    pub all: bool,
}

/// How a worker ended, for the launcher to judge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    pub db: u32,
    pub state: State,
    pub started_at: i64,
    /// See `Entry::recheck`.
    pub recheck: bool,
}

/// The registry, locked.
pub struct Registry<'a> {
    pub header: &'a mut Header,
    pub entries: &'a mut [Entry],
}

impl Registry<'_> {
    /// Slots needed to serve `max_databases`.
    pub fn slots(max_databases: usize) -> usize {
        max_databases + PROBES
    }

    fn find(&mut self, db: u32) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.state != State::Free && entry.db == db)
    }

    // The launcher's side.

    /// A launcher begins. What an earlier one asked of the postmaster and did not see
    /// start is forgotten: should it start all the same, its generation is unknown
    /// and it ends. Workers that run are kept.
    pub fn launcher_begins(&mut self, launcher: Process) {
        self.header.launcher_pid = launcher.pid;
        self.header.launcher_number = launcher.number;
        for entry in self.entries.iter_mut() {
            if entry.state == State::Starting && entry.pid == 0 {
                entry.state = State::Left;
            }
        }
    }

    pub fn launcher_ends(&mut self, pid: i32) {
        if self.header.launcher_pid == pid {
            self.header.launcher_pid = 0;
            self.header.launcher_number = NOBODY;
        }
    }

    pub fn launcher(&self) -> Option<Process> {
        (self.header.launcher_pid != 0).then_some(Process {
            pid: self.header.launcher_pid,
            number: self.header.launcher_number,
        })
    }

    /// Takes what was asked since the last time, and tells running probes about it.
    pub fn take_requests(&mut self) -> Requests {
        let count = usize::try_from(self.header.request_count).unwrap_or(0);
        let requests = Requests {
            databases: self.header.requests.iter().take(count).copied().collect(),
            all: self.header.recheck_all,
        };
        self.header.request_count = 0;
        self.header.recheck_all = false;
        for entry in self.entries.iter_mut().filter(|entry| entry.state != State::Free) {
            if requests.all || requests.databases.contains(&entry.db) {
                entry.recheck = true;
            }
        }
        requests
    }

    /// A slot for a worker to be started; its generation, or None when all are taken.
    pub fn allocate(&mut self, db: u32) -> Option<u32> {
        let generation = self.header.generation.wrapping_add(1);
        let entry = self.entries.iter_mut().find(|entry| entry.state == State::Free)?;
        *entry = Entry {
            db,
            generation,
            pid: 0,
            number: NOBODY,
            holds: 0,
            started_at: 0,
            state: State::Starting,
            ending: State::Failed,
            recheck: false,
            woken: false,
        };
        self.header.generation = generation;
        Some(generation)
    }

    /// The worker of this generation never came to life.
    pub fn start_failed(&mut self, db: u32, generation: u32, state: State) {
        if self.is_unborn(db, generation)
            && let Some(entry) = self.find(db)
        {
            entry.state = state;
        }
    }

    /// Whether the worker of this generation is still to come to life.
    pub fn is_unborn(&mut self, db: u32, generation: u32) -> bool {
        self.find(db).is_some_and(|entry| {
            entry.generation == generation && entry.state == State::Starting && entry.pid == 0
        })
    }

    /// Takes out those that ended and that no session holds.
    pub fn reap(&mut self) -> Vec<Ended> {
        let mut ended = Vec::new();
        for entry in self.entries.iter_mut() {
            if entry.state.has_ended() && entry.holds == 0 {
                ended.push(Ended {
                    db: entry.db,
                    state: entry.state,
                    started_at: entry.started_at,
                    recheck: entry.recheck,
                });
                entry.state = State::Free;
            }
        }
        ended
    }

    /// Databases with a slot.
    pub fn occupied(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| entry.state != State::Free)
    }

    /// Marks the worker as told to end; the pid to signal.
    pub fn stop(&mut self, db: u32) -> Option<i32> {
        let entry = self.find(db)?;
        if !matches!(entry.state, State::Starting | State::Running) || entry.pid == 0 {
            return None;
        }
        entry.state = State::Stopping;
        entry.ending = State::Left;
        Some(entry.pid)
    }

    // The worker's side.

    /// The worker has come to life. False: it is not wanted (any more).
    pub fn publish(&mut self, db: u32, generation: u32, worker: Process) -> bool {
        let Some(entry) = self.find(db) else { return false };
        if entry.generation != generation || entry.state != State::Starting || entry.pid != 0 {
            return false;
        }
        if entry.holds > 0 {
            entry.state = State::Left;
            return false;
        }
        entry.pid = worker.pid;
        entry.number = worker.number;
        // Whoever makes the extension after this is seen by the worker's look.
        entry.recheck = false;
        true
    }

    /// The worker found the extension. False: `most` are served already.
    pub fn serve(&mut self, db: u32, pid: i32, now: i64, most: usize) -> bool {
        let running = self.entries.iter().filter(|entry| entry.state == State::Running).count();
        match self.find(db) {
            Some(entry) if entry.pid == pid && entry.state == State::Starting => {
                if running >= most {
                    return false;
                }
                entry.state = State::Running;
                entry.started_at = now;
                true
            }
            // Told to end meanwhile: the signal is on its way.
            _ => true,
        }
    }

    /// The worker is going to end, for this reason.
    pub fn ending(&mut self, db: u32, pid: i32, state: State) {
        if let Some(entry) = self.find(db)
            && entry.pid == pid
        {
            entry.ending = state;
        }
    }

    /// The worker holds nothing any more.
    pub fn worker_gone(&mut self, db: u32, pid: i32) {
        if let Some(entry) = self.find(db)
            && entry.pid == pid
        {
            entry.state = entry.ending;
            entry.pid = 0;
            entry.number = NOBODY;
        }
    }

    /// Whether something became due sooner than the worker knew.
    pub fn take_woken(&mut self, db: u32) -> bool {
        self.find(db).is_some_and(|entry| core::mem::take(&mut entry.woken))
    }

    // Everybody else's side.

    /// The worker that serves the database, told that something is due.
    pub fn wake(&mut self, db: u32) -> Option<Process> {
        let entry = self.find(db)?;
        entry.woken = true;
        (entry.pid != 0).then_some(Process { pid: entry.pid, number: entry.number })
    }

    pub fn worker(&mut self, db: u32) -> Option<Process> {
        let entry = self.find(db)?;
        (entry.pid != 0).then_some(Process { pid: entry.pid, number: entry.number })
    }

    /// Whether it has a worker that found the extension.
    pub fn is_served(&mut self, db: u32) -> bool {
        self.find(db).is_some_and(|entry| entry.state == State::Running)
    }

    /// Keeps workers out of the database. False: there is no slot, and none is needed,
    /// because the caller has the database locked against new connections.
    pub fn hold(&mut self, db: u32) -> bool {
        let Some(entry) = self.find(db) else { return false };
        entry.holds += 1;
        true
    }

    pub fn release(&mut self, db: u32) {
        if let Some(entry) = self.find(db) {
            entry.holds = entry.holds.saturating_sub(1);
        }
    }

    /// The database shall be looked at again.
    pub fn request(&mut self, db: u32) {
        let count = usize::try_from(self.header.request_count).unwrap_or(0);
        if self.header.requests.iter().take(count).any(|&known| known == db) {
            return;
        }
        match self.header.requests.get_mut(count) {
            Some(slot) => {
                *slot = db;
                self.header.request_count += 1;
            }
            None => self.header.recheck_all = true,
        }
    }

    pub fn note_prepared(&mut self) {
        self.header.prepared = true;
    }

    pub fn has_prepared(&self) -> bool {
        self.header.prepared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_registry(slots: usize, test: impl FnOnce(&mut Registry<'_>)) {
        let mut header = Header {
            launcher_pid: 0,
            launcher_number: 0,
            generation: 0,
            request_count: 0,
            requests: [0; REQUESTS],
            recheck_all: false,
            prepared: false,
        };
        let free = Entry {
            db: 0,
            generation: 0,
            pid: 0,
            number: 0,
            holds: 0,
            started_at: 0,
            state: State::Free,
            ending: State::Free,
            recheck: false,
            woken: false,
        };
        let mut entries = vec![free; slots];
        test(&mut Registry { header: &mut header, entries: &mut entries });
    }

    const WORKER: Process = Process { pid: 100, number: 7 };

    fn start(registry: &mut Registry<'_>, db: u32) -> u32 {
        let generation = registry.allocate(db).unwrap_or(0);
        assert!(registry.publish(db, generation, WORKER));
        generation
    }

    #[test]
    fn a_late_worker_of_an_earlier_launcher_is_not_wanted() {
        with_registry(2, |registry| {
            let stale = registry.allocate(5).unwrap_or(0);
            registry.launcher_begins(Process { pid: 1, number: 1 });
            assert_eq!(registry.reap().len(), 1);
            let fresh = registry.allocate(5).unwrap_or(0);
            assert!(!registry.publish(5, stale, WORKER));
            assert!(registry.publish(5, fresh, WORKER));
        });
    }

    #[test]
    fn a_running_worker_is_adopted() {
        with_registry(2, |registry| {
            start(registry, 5);
            assert!(registry.serve(5, 100, 9, 1));
            registry.launcher_begins(Process { pid: 1, number: 1 });
            assert!(registry.reap().is_empty());
            assert_eq!(registry.worker(5), Some(WORKER));
        });
    }

    #[test]
    fn a_worker_does_not_start_while_held() {
        with_registry(2, |registry| {
            let generation = registry.allocate(5).unwrap_or(0);
            assert!(registry.hold(5));
            assert!(!registry.publish(5, generation, WORKER));
            assert!(registry.reap().is_empty(), "a held slot stays");
            registry.release(5);
            assert_eq!(registry.reap().first().map(|e| e.state), Some(State::Left));
        });
    }

    #[test]
    fn an_unexpected_end_is_a_failure_and_an_ordered_one_is_not() {
        with_registry(2, |registry| {
            start(registry, 5);
            registry.worker_gone(5, 100);
            assert_eq!(registry.reap().first().map(|e| e.state), Some(State::Failed));
            start(registry, 5);
            assert_eq!(registry.stop(5), Some(100));
            assert_eq!(registry.stop(5), None, "once is enough");
            registry.worker_gone(5, 100);
            assert_eq!(registry.reap().first().map(|e| e.state), Some(State::Left));
        });
    }

    #[test]
    fn a_stillborn_worker_is_a_failure() {
        with_registry(2, |registry| {
            let generation = registry.allocate(5).unwrap_or(0);
            assert!(registry.is_unborn(5, generation));
            registry.start_failed(5, generation.wrapping_add(1), State::Failed);
            assert!(registry.reap().is_empty(), "another worker's end");
            registry.start_failed(5, generation, State::Failed);
            assert_eq!(registry.reap().first().map(|e| e.state), Some(State::Failed));
        });
    }

    #[test]
    fn an_extension_made_after_the_look_is_noticed() {
        with_registry(2, |registry| {
            start(registry, 5);
            registry.ending(5, 100, State::Absent);
            registry.request(5);
            registry.take_requests();
            registry.worker_gone(5, 100);
            assert_eq!(registry.reap().first().map(|e| e.recheck), Some(true));
        });
    }

    #[test]
    fn only_so_many_databases_are_served() {
        with_registry(3, |registry| {
            start(registry, 5);
            assert!(registry.serve(5, 100, 0, 1));
            start(registry, 6);
            assert!(!registry.serve(6, 100, 0, 1));
        });
    }

    #[test]
    fn requests_that_do_not_fit_ask_for_everything() {
        with_registry(1, |registry| {
            for db in 0..=u32::try_from(REQUESTS).unwrap_or(0) {
                registry.request(db);
                registry.request(db);
            }
            let requests = registry.take_requests();
            assert_eq!(requests.databases.len(), REQUESTS);
            assert!(requests.all);
            assert_eq!(registry.take_requests(), Requests::default());
        });
    }
}
