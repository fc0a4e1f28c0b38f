//! The launcher: sees to it that every database with the extension has its worker.
//!
//! It is connected to no database and holds no state that matters: a new one finds
//! the workers of an old one in the registry and looks at everything else again.

use core::time::Duration;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::registry::{Ended, State};
use super::{backoff, callbacks};
use crate::error::{Error, Result, SqlState};
use crate::pg::database::{self, Database};
use crate::pg::worker::Started;
use crate::pg::{guc, registry, worker};

/// Looks at everything again, in case something happened behind the hooks.
const SWEEP: Duration = Duration::from_secs(60);

/// Workers being started at a time: a server with many databases without the
/// extension must not lose all its worker slots to probes.
const STARTS: usize = 3;

/// Between attempts while there is no free worker slot, or the catalog cannot be read.
const PAUSE: Duration = Duration::from_secs(5);

/// While a worker is being started, in case the postmaster's word gets lost.
const START_CHECK: Duration = Duration::from_secs(1);

pub fn run() {
    worker::begin();
    let me = worker::this_process();
    worker::at_exit(0, |_| {
        let me = worker::this_process();
        registry::with(|registry| registry.launcher_ends(me.pid));
    });
    worker::connect_to_none();
    registry::with(|registry| registry.launcher_begins(me));
    let mut launcher = Launcher::new();
    loop {
        let sleep = launcher.turn(Instant::now());
        worker::wait(sleep);
    }
}

struct Launcher {
    /// Databases found to be without the extension.
    absent: BTreeSet<u32>,
    failing: BTreeMap<u32, Failing>,
    starting: Vec<Start>,
    next_sweep: Instant,
    /// No start before this: there was no free worker slot.
    no_slot_until: Option<Instant>,
    /// When the lack of slots was last complained about.
    complained: Option<Instant>,
}

struct Failing {
    count: u32,
    retry_at: Instant,
}

struct Start {
    database: u32,
    generation: u32,
    handle: Started,
}

impl Launcher {
    fn new() -> Self {
        Self {
            absent: BTreeSet::new(),
            failing: BTreeMap::new(),
            starting: Vec::new(),
            next_sweep: Instant::now(),
            no_slot_until: None,
            complained: None,
        }
    }

    /// Brings the workers in line with the databases; how long there is nothing to do.
    fn turn(&mut self, now: Instant) -> Option<Duration> {
        if now >= self.next_sweep {
            self.next_sweep = now + SWEEP;
            self.absent.clear();
        }
        self.note_requests();
        self.note_stillborn();
        let databases = match list_databases() {
            Ok(databases) => databases,
            Err(error) => {
                worker::warn("awa launcher could not list the databases", &error);
                return Some(PAUSE);
            }
        };
        self.note_ended(&databases, now);
        self.forget_missing(&databases);
        stop_unwanted(&databases);
        if !guc::enabled() {
            // The workers leave by themselves when they see it.
            return None;
        }
        self.start_missing(&databases, now);
        Some(self.next_look(now))
    }

    fn note_requests(&mut self) {
        let requests = registry::with(|registry| registry.take_requests()).unwrap_or_default();
        if requests.all {
            self.absent.clear();
        }
        for database in requests.databases {
            self.absent.remove(&database);
        }
    }

    /// A worker that ended before it came to life (no fork, no library, too many
    /// clients) leaves no trace in the registry: the postmaster knows.
    fn note_stillborn(&mut self) {
        self.starting.retain(|start| {
            let has_ended = start.handle.has_ended();
            registry::with(|registry| {
                if has_ended {
                    registry.start_failed(start.database, start.generation, State::Failed);
                }
                registry.is_unborn(start.database, start.generation)
            }) == Some(true)
        });
    }

    fn note_ended(&mut self, databases: &[Database], now: Instant) {
        for ended in registry::with(|registry| registry.reap()).unwrap_or_default() {
            if databases.iter().any(|database| database.oid == ended.db) {
                self.judge(ended, now);
            } else if let Some(callbacks) = callbacks() {
                (callbacks.on_drop_database)(ended.db);
            }
        }
    }

    fn judge(&mut self, ended: Ended, now: Instant) {
        match ended.state {
            State::Failed => {
                let before = self.failing.get(&ended.db).map_or(0, |failing| failing.count);
                let count = backoff::count(before, uptime(ended.started_at));
                let retry_at = now + backoff::delay(count);
                self.failing.insert(ended.db, Failing { count, retry_at });
            }
            State::Absent => {
                self.failing.remove(&ended.db);
                if !ended.recheck {
                    self.absent.insert(ended.db);
                }
            }
            _ => {}
        }
    }

    fn forget_missing(&mut self, databases: &[Database]) {
        let oids: BTreeSet<u32> = databases.iter().map(|database| database.oid).collect();
        self.absent.retain(|database| oids.contains(database));
        self.failing.retain(|database, _| oids.contains(database));
        if let Some(callbacks) = callbacks() {
            let oids: Vec<u32> = oids.into_iter().collect();
            (callbacks.on_databases)(&oids);
        }
    }

    fn start_missing(&mut self, databases: &[Database], now: Instant) {
        if self.no_slot_until.is_some_and(|until| now < until) {
            return;
        }
        self.no_slot_until = None;
        let (occupied, mut starting) = registry::with(|registry| {
            let occupied: Vec<u32> = registry.occupied().map(|entry| entry.db).collect();
            let starting =
                registry.occupied().filter(|entry| entry.state == State::Starting).count();
            (occupied, starting)
        })
        .unwrap_or_default();
        for database in databases.iter().filter(|database| database.is_open) {
            let is_due =
                self.failing.get(&database.oid).is_none_or(|failing| failing.retry_at <= now);
            if !is_due || occupied.contains(&database.oid) || self.absent.contains(&database.oid) {
                continue;
            }
            if starting >= STARTS || !self.start(database, now) {
                // The end of any worker brings us here again.
                return;
            }
            starting += 1;
        }
    }

    fn start(&mut self, database: &Database, now: Instant) -> bool {
        let generation = registry::with(|registry| registry.allocate(database.oid)).flatten();
        let Some(generation) = generation else { return false };
        let Some(handle) = worker::start(database.oid, &database.name, generation) else {
            registry::with(|registry| {
                registry.start_failed(database.oid, generation, State::Left);
            });
            self.no_slot_until = Some(now + PAUSE);
            self.complain(database, now);
            return false;
        };
        self.starting.push(Start { database: database.oid, generation, handle });
        true
    }

    fn complain(&mut self, database: &Database, now: Instant) {
        if self.complained.is_some_and(|at| now < at + SWEEP) {
            return;
        }
        self.complained = Some(now);
        let error = Error::new(SqlState::INTERNAL, "out of background worker slots")
            .hint("You might need to increase max_worker_processes.");
        worker::warn(&format!("could not start awa in database \"{}\"", database.name), &error);
    }

    fn next_look(&self, now: Instant) -> Duration {
        let retries = self.failing.values().map(|failing| failing.retry_at);
        let start_check = (!self.starting.is_empty()).then_some(now + START_CHECK);
        let next = retries
            // One that is due and was not started waits for a slot, or is starting.
            .filter(|&at| at > now)
            .chain(start_check)
            .chain(self.no_slot_until)
            .fold(self.next_sweep, Instant::min);
        next.saturating_duration_since(now)
    }
}

fn list_databases() -> Result<Vec<Database>> {
    worker::in_transaction("awa: list the databases", || Ok(database::databases()))
}

/// Ends the workers of databases that became templates or closed.
fn stop_unwanted(databases: &[Database]) {
    registry::with(|registry| {
        let unwanted: Vec<u32> = registry
            .occupied()
            .map(|entry| entry.db)
            .filter(|&db| !databases.iter().any(|open| open.oid == db && open.is_open))
            .collect();
        for database in unwanted {
            if let Some(pid) = registry.stop(database) {
                worker::terminate(pid);
            }
        }
    });
}

fn uptime(started_at: i64) -> Duration {
    if started_at == 0 {
        return Duration::ZERO;
    }
    Duration::from_micros(u64::try_from(worker::clock() - started_at).unwrap_or(0))
}
