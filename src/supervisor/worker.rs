//! The worker of one database: looks whether the extension is there, then does
//! maintenance until it is told to leave.

use core::time::Duration;
use std::time::Instant;

use super::registry::State;
use super::wake_launcher;
use crate::error::Result;
use crate::maintenance::{Context, Outcome, Schedule};
use crate::pg::{catalog, database, guc, registry, worker};

/// While somebody may be dropping the extension, whose lock we do not queue for.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// With nothing to do, the extension is looked at again after this.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

pub fn run(database: u32, generation: u32) {
    worker::begin();
    let me = worker::this_process();
    worker::at_exit(database, |database| {
        let me = worker::this_process();
        registry::with(|registry| registry.worker_gone(database, me.pid));
        wake_launcher();
    });
    let is_wanted =
        registry::with(|registry| registry.publish(database, generation, me)) == Some(true);
    if !is_wanted {
        return;
    }
    worker::connect(database);
    // Returning is exit code 0, of which the postmaster makes no fuss; the launcher
    // goes by what is written here. Anything else that ends us is a failure.
    let reason = serve(database, me.pid);
    registry::with(|registry| registry.ending(database, me.pid, reason));
}

/// How it ended, when in order.
fn serve(database: u32, pid: i32) -> State {
    let look = worker::in_transaction("awa: look for the extension", || Ok(database::extension()));
    let extension = match look {
        Ok(Some(extension)) => extension,
        Ok(None) => {
            tell_extension(database, None);
            return State::Absent;
        }
        Err(error) => {
            worker::warn("awa worker could not look for its extension", &error);
            return State::Failed;
        }
    };
    tell_extension(database, Some(extension));
    if let Err(error) = worker::in_transaction("awa: look at the version", catalog::ensure_version)
    {
        // The next sweep looks again.
        worker::warn("awa does not serve this database", &error);
        return State::Absent;
    }
    let most = guc::max_databases();
    let is_served = registry::with(|registry| registry.serve(database, pid, worker::clock(), most));
    if is_served != Some(true) {
        let error = crate::error::Error::new(
            crate::error::SqlState::CAPACITY,
            format!("{most} databases are served already"),
        )
        .hint("You might need to increase awa.max_databases.");
        worker::warn("awa does not serve this database", &error);
        return State::Absent;
    }
    maintain(&Context { database, extension, forced: false })
}

/// What others made in this database and rolled back, or dropped, is gone.
fn tell_extension(database: u32, extension: Option<u32>) {
    if let Some(callbacks) = super::callbacks() {
        (callbacks.on_extension)(database, extension);
    }
}

fn maintain(context: &Context) -> State {
    let mut schedule = Schedule::new(crate::maintenance::STEPS);
    loop {
        if !guc::enabled() {
            return State::Left;
        }
        let woken = registry::with(|registry| registry.take_woken(context.database));
        let presence = match worker::in_transaction("awa: look around", || look(context)) {
            Ok(presence) => presence,
            Err(error) => {
                worker::warn("awa worker could not look at its extension", &error);
                Presence::Busy
            }
        };
        let sleep = match presence {
            Presence::Gone => return State::Absent,
            Presence::Replaced => return State::Left,
            Presence::Busy => BUSY_PAUSE,
            Presence::Here => {
                if crate::maintenance::wake_up(context) || woken == Some(true) {
                    schedule.wake();
                }
                schedule.tick(Instant::now, |step| run_step(context, step)).unwrap_or(LONGEST_SLEEP)
            }
        };
        let sleep = crate::maintenance::plan_sleep(context, sleep.min(LONGEST_SLEEP));
        if worker::wait(Some(sleep)) {
            // Whatever a step based its next time on may have changed.
            schedule.wake();
        }
    }
}

enum Presence {
    Here,
    /// Somebody has the extension locked, to drop it.
    Busy,
    Gone,
    /// Dropped and made again: nothing that was known of the old one holds.
    Replaced,
}

/// In a transaction: holds the extension there until its end, without ever waiting.
fn look(context: &Context) -> Result<Presence> {
    if !database::try_lock_extension(context.extension) {
        return Ok(Presence::Busy);
    }
    Ok(match database::extension() {
        Some(extension) if extension == context.extension => Presence::Here,
        Some(_) => Presence::Replaced,
        None => Presence::Gone,
    })
}

/// One step in a transaction of its own, in which the extension cannot go away.
fn run_step(context: &Context, step: &crate::maintenance::Step) -> Outcome {
    let result = worker::in_transaction(step.activity, || match look(context)? {
        Presence::Here => step.perform(context).map(Some),
        _ => Ok(None),
    });
    match result {
        Ok(Some(report)) => Outcome::Done(report),
        Ok(None) => Outcome::Skipped,
        Err(error) if error.code.0 == *b"57014" => Outcome::Skipped,
        Err(error) => {
            worker::warn(&format!("awa maintenance step \"{}\" failed", step.name), &error);
            Outcome::Failed
        }
    }
}
