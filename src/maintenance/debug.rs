//! A step that behaves as badly as a test asks it to; in builds for tests only.

use super::{Context, Kind, Step, StepReport};
use crate::error::{Error, Result, SqlState};
use crate::pg::{guc, latch, worker};

pub const STEP: Step =
    Step { name: "debug", activity: "awa: debug step", run, kind: Kind::Punctual };

fn run(_context: &Context) -> Result<StepReport> {
    match guc::debug_step().as_deref() {
        // Long, but listening.
        // Nothing is to wait for its snapshot.
        Some("nap") => {
            worker::let_go_of_snapshot();
            loop {
                latch::wait(1_000);
            }
        }
        Some("error") => {
            return Err(Error::new(SqlState::WRONG_STATE, "the step failed as told")
                .detail("A detail.")
                .hint("A hint."));
        }
        Some("raise") => worker::raise("the server failed as told"),
        Some("panic") => panic!("the step panicked as told"),
        _ => {}
    }
    Ok(StepReport { did: 0, next: None })
}
