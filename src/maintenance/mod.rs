//! What the worker does, a file a step.
//!
//! A step is run in a transaction of its own and says when it wants to be run next.
//! It may die at any line: only what it committed counts, and running it again is
//! always right. A step that fails is tried again later and later; the others are
//! not affected.
#![deny(unsafe_code)]

mod control;
#[cfg(feature = "debug_points")]
mod debug;
mod history;
pub mod index;
mod promote;
mod replay;
pub mod rescue;
mod retention;
mod runtimes;
mod turnover;

use core::time::Duration;
use std::time::Instant;

use crate::dispatch;
use crate::error::Result;
use crate::pg::debug_point::debug_point;
use crate::pg::{latch, xact};

/// Where a step works.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    pub database: u32,
    /// The extension's OID: another one after DROP and CREATE.
    pub extension: u32,
    /// Called by hand: intervals do not count.
    pub forced: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepReport {
    /// How many things were done, in the step's own unit.
    pub did: u64,
    /// When to run again; zero: there is more to do; None: when woken.
    pub next: Option<Duration>,
}

pub struct Step {
    pub name: &'static str,
    /// Shown in pg_stat_activity.
    pub activity: &'static str,
    pub run: fn(&Context) -> Result<StepReport>,
    pub kind: Kind,
}

/// What a step may be kept from, or kept waiting for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// It is on time.
    Punctual,
    /// It looks around now and then, and may come a little earlier.
    Look,
    /// As `Look`; a halt of pruning stops it.
    Prune,
}

impl Step {
    /// Does what is due. A test can stop a step that did something, before its commit, at
    /// the point that is named after it.
    pub fn perform(&self, context: &Context) -> Result<StepReport> {
        if self.kind == Kind::Prune && !control::may_prune()? {
            return Ok(StepReport { did: 0, next: Some(control::LOOK) });
        }
        let report = (self.run)(context)?;
        if report.did > 0 {
            debug_point!(self.name, interruptible);
        }
        Ok(report)
    }
}

/// All steps, in the order in which they run when several are due.
pub static STEPS: &[Step] = &[
    Step { name: "replay", activity: "awa: replay", run: replay::run, kind: Kind::Punctual },
    Step {
        name: "doubts",
        activity: "awa: probe doubts",
        run: replay::probe_doubts,
        kind: Kind::Punctual,
    },
    Step {
        name: "receipts",
        activity: "awa: renew receipts",
        run: replay::renew_receipts,
        kind: Kind::Punctual,
    },
    Step {
        name: "fence",
        activity: "awa: fence silent runtimes",
        run: rescue::fence_silent,
        kind: Kind::Punctual,
    },
    Step {
        name: "runtimes",
        activity: "awa: note runtimes that ended",
        run: runtimes::note_ended,
        kind: Kind::Punctual,
    },
    Step {
        name: "return",
        activity: "awa: return released jobs",
        run: promote::return_released,
        kind: Kind::Punctual,
    },
    Step {
        name: "promote",
        activity: "awa: promote due jobs",
        run: promote::promote_due,
        kind: Kind::Punctual,
    },
    Step {
        name: "rescue_owner",
        activity: "awa: rescue orphans",
        run: rescue::rescue_orphans,
        kind: Kind::Punctual,
    },
    Step {
        name: "rescue_deadline",
        activity: "awa: rescue expired",
        run: rescue::rescue_expired,
        kind: Kind::Punctual,
    },
    Step {
        name: "rescue_callback",
        activity: "awa: rescue callbacks",
        run: rescue::rescue_callbacks,
        kind: Kind::Punctual,
    },
    Step {
        name: "control",
        activity: "awa: look for a halt",
        run: control::look,
        kind: Kind::Look,
    },
    Step {
        name: "retention",
        activity: "awa: forget failed jobs",
        run: retention::clean_up,
        kind: Kind::Prune,
    },
    Step {
        name: "forget_runtimes",
        activity: "awa: forget runtimes that ended",
        run: runtimes::forget_ended,
        kind: Kind::Prune,
    },
    Step {
        name: "rotate",
        activity: "awa: rotate segments",
        run: turnover::rotate,
        kind: Kind::Prune,
    },
    Step { name: "count", activity: "awa: count ends", run: turnover::count, kind: Kind::Look },
    Step {
        name: "list",
        activity: "awa: list sealed segments",
        run: turnover::list,
        kind: Kind::Prune,
    },
    Step {
        name: "truncate",
        activity: "awa: truncate segments",
        run: turnover::truncate,
        kind: Kind::Prune,
    },
    Step {
        name: "index",
        activity: "awa: index segments that stay",
        run: index::run,
        kind: Kind::Look,
    },
    #[cfg(feature = "debug_points")]
    debug::STEP,
];

/// The worker is awake: nobody has to wake it. True when the dispatcher has something for it.
pub fn wake_up(context: &Context) -> bool {
    let (me, now) = (latch::my_proc_number(), xact::micros());
    dispatch::with(|d| {
        let Some(db) = d.database(context.database, context.extension) else { return false };
        let due = d.next_due(db) <= now;
        let database = d.base(db);
        database.worker = me + 1;
        database.worker_sleeps_until = i64::MIN;
        due
    })
}

/// A pause of the worker while the dispatcher says that something is due: what could not be
/// done at once is not tried in a tight loop.
const BREATH: Duration = Duration::from_millis(10);

/// How long the worker may sleep, at most `longest`, before the dispatcher has something for
/// it. What becomes due earlier wakes it.
pub fn plan_sleep(context: &Context, longest: Duration) -> Duration {
    let now = xact::micros();
    dispatch::with(|d| {
        let Some(db) = d.database(context.database, context.extension) else { return longest };
        let ahead = d.next_due(db).saturating_sub(now).max(0) as u64;
        let sleep = longest.min(Duration::from_micros(ahead).max(BREATH));
        d.base(db).worker_sleeps_until = now.saturating_add(sleep.as_micros() as i64);
        sleep
    })
}

/// How a run of a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Done(StepReport),
    /// Not now: the extension is being dropped, or the step was cancelled for that.
    Skipped,
    Failed,
}

/// After a step was skipped.
const SKIP_PAUSE: Duration = Duration::from_secs(1);
/// After the first failure of a step, and after many.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// How much earlier a look for something to prune may come.
const SLACK: Duration = Duration::from_millis(100);

/// When each step is due.
pub struct Schedule {
    steps: &'static [Step],
    due: Vec<Due>,
}

#[derive(Clone, Copy, Default)]
struct Due {
    /// None: only when woken. Before the first tick: at once.
    at: Option<Instant>,
    is_known: bool,
    failures: u32,
}

impl Schedule {
    pub fn new(steps: &'static [Step]) -> Self {
        Self { steps, due: vec![Due::default(); steps.len()] }
    }

    /// Something became due: every step shall look, except those that wait after a
    /// failure.
    pub fn wake(&mut self) {
        for due in self.due.iter_mut().filter(|due| due.failures == 0) {
            due.is_known = false;
        }
    }

    /// Runs every step that is due, once; how long until the next one is, or None
    /// when all wait to be woken.
    pub fn tick(
        &mut self,
        clock: impl Fn() -> Instant,
        mut run: impl FnMut(&Step) -> Outcome,
    ) -> Option<Duration> {
        for (step, due) in self.steps.iter().zip(self.due.iter_mut()) {
            // Looks that are due soon are had now: one wake-up instead of several.
            let slack = if step.kind == Kind::Punctual { Duration::ZERO } else { SLACK };
            if due.is_known && due.at.is_none_or(|at| clock() + slack < at) {
                continue;
            }
            let outcome = run(step);
            let now = clock();
            due.is_known = true;
            due.failures = match outcome {
                Outcome::Failed => due.failures.saturating_add(1),
                _ => 0,
            };
            due.at = match outcome {
                Outcome::Done(report) => report.next.map(|next| now + next),
                Outcome::Skipped => Some(now + SKIP_PAUSE),
                Outcome::Failed => Some(now + pause(due.failures)),
            };
        }
        let now = clock();
        self.due.iter().filter_map(|due| due.at).min().map(|at| at.saturating_duration_since(now))
    }
}

fn pause(failures: u32) -> Duration {
    FIRST_PAUSE.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(LONGEST_PAUSE)
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;

    fn nothing(_context: &Context) -> Result<StepReport> {
        Ok(StepReport { did: 0, next: None })
    }

    static TWO: &[Step] = &[
        Step { name: "a", activity: "a", run: nothing, kind: Kind::Punctual },
        Step { name: "b", activity: "b", run: nothing, kind: Kind::Punctual },
    ];

    fn done(next: Option<Duration>) -> Outcome {
        Outcome::Done(StepReport { did: 1, next })
    }

    #[test]
    fn a_failing_step_does_not_keep_the_others_from_running() {
        let start = Instant::now();
        let now = Cell::new(start);
        let mut schedule = Schedule::new(TWO);
        let sleep = schedule.tick(
            || now.get(),
            |step| match step.name {
                "a" => Outcome::Failed,
                _ => done(Some(Duration::from_millis(200))),
            },
        );
        assert_eq!(sleep, Some(Duration::from_millis(200)));
        now.set(start + Duration::from_millis(200));
        let mut ran = Vec::new();
        schedule.tick(
            || now.get(),
            |step| {
                ran.push(step.name);
                done(None)
            },
        );
        assert_eq!(ran, ["b"]);
        now.set(start + FIRST_PAUSE);
        let mut ran = Vec::new();
        let sleep = schedule.tick(
            || now.get(),
            |step| {
                ran.push(step.name);
                done(None)
            },
        );
        assert_eq!(ran, ["a"]);
        assert_eq!(sleep, None);
    }

    #[test]
    fn looks_that_are_due_soon_share_a_wake_up() {
        static STEPS: &[Step] = &[
            Step { name: "exact", activity: "", run: nothing, kind: Kind::Punctual },
            Step { name: "soon", activity: "", run: nothing, kind: Kind::Prune },
            Step { name: "late", activity: "", run: nothing, kind: Kind::Prune },
        ];
        let start = Instant::now();
        let mut schedule = Schedule::new(STEPS);
        schedule.tick(
            || start,
            |step| {
                done(Some(match step.name {
                    "exact" => Duration::from_millis(903),
                    "soon" => Duration::from_secs(1),
                    _ => Duration::from_secs(2),
                }))
            },
        );
        let mut ran = Vec::new();
        schedule.tick(
            || start + Duration::from_millis(903),
            |step| {
                ran.push(step.name);
                done(None)
            },
        );
        assert_eq!(ran, ["exact", "soon"]);
    }

    #[test]
    fn a_wake_up_runs_what_sleeps_but_not_what_failed() {
        let now = Instant::now();
        let mut schedule = Schedule::new(TWO);
        schedule.tick(
            || now,
            |step| match step.name {
                "a" => Outcome::Failed,
                _ => done(None),
            },
        );
        schedule.wake();
        let mut ran = Vec::new();
        schedule.tick(
            || now,
            |step| {
                ran.push(step.name);
                done(None)
            },
        );
        assert_eq!(ran, ["b"]);
    }

    #[test]
    fn failures_wait_longer_and_longer() {
        assert_eq!(pause(1), FIRST_PAUSE);
        assert_eq!(pause(3), FIRST_PAUSE * 4);
        assert_eq!(pause(40), LONGEST_PAUSE);
    }
}
