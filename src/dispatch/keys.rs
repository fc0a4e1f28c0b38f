//! A job's unique key on its way from state to state.
//!
//! A job holds its key exactly while it is in a state of its mask, so each transition
//! takes the key, frees it or leaves it, in its own transaction. One transition has none:
//! a job that was released in place becomes available when its timer fires. Jobs whose key
//! would have to change hands then wait in `deferred_jobs` instead, whose promotion is a
//! transaction.

use crate::domain::unique::{Mask, State};
use crate::error::{Error, Result, SqlState};
use crate::pg::datum::{Bits8, ToDatum};
use crate::store::body::Body;
use crate::store::unique::{self, CONSTRAINT, Keys, Taking};

/// Whether an open transaction that has changed the key is waited for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Patience {
    Wait,
    /// The worker's: it has other jobs to look after.
    Skip,
}

/// What became of a transition as far as the key is concerned.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Switched {
    Done,
    /// The key of the new state is held by this job: the transition must not happen.
    Lost(i64),
    /// An open transaction decides; ask again later.
    Busy,
}

/// Moves keys; opens their table when the first one has to move.
pub struct Switcher {
    keys: Option<Keys>,
    patience: Patience,
}

impl Switcher {
    pub fn new(patience: Patience) -> Self {
        Self { keys: None, patience }
    }

    fn may_wait(&self) -> bool {
        self.patience == Patience::Wait
    }

    fn keys(&mut self) -> Result<&Keys> {
        let keys = match self.keys.take() {
            Some(keys) => keys,
            None => Keys::open()?,
        };
        Ok(self.keys.insert(keys))
    }

    pub fn take(&mut self, key: &[u8], job_id: i64) -> Result<Switched> {
        let may_wait = self.may_wait();
        Ok(match self.keys()?.take(key, job_id, may_wait)? {
            Taking::Taken => Switched::Done,
            Taking::Held(holder) => Switched::Lost(holder),
            Taking::Open => Switched::Busy,
        })
    }

    /// The job goes from one state to another.
    pub fn switch(&mut self, job_id: i64, body: &Body, from: State, to: State) -> Result<Switched> {
        let Some((key, mask)) = unique::of_body(body) else { return Ok(Switched::Done) };
        match (mask.has(from), mask.has(to)) {
            (false, true) => self.take(&key, job_id),
            (true, false) => {
                self.keys()?.free(&key, job_id);
                Ok(Switched::Done)
            }
            _ => Ok(Switched::Done),
        }
    }

    /// The job is forgotten in this state.
    pub fn drop_key(&mut self, job_id: i64, body: &Body, state: State) -> Result<()> {
        if let Some((key, mask)) = unique::of_body(body)
            && mask.has(state)
        {
            self.keys()?.free(&key, job_id);
        }
        Ok(())
    }

    /// The job comes to its end, which cannot be refused: a key that another job has got
    /// meanwhile stays there, and the job goes without from then on.
    pub fn end(&mut self, job_id: i64, body: &mut Body, from: State, to: State) -> Result<bool> {
        match self.switch(job_id, body, from, to)? {
            Switched::Done => Ok(true),
            Switched::Lost(_) => {
                body.unique_states = body.unique_states.map(|_| Bits8(0).to_datum());
                Ok(true)
            }
            Switched::Busy => Ok(false),
        }
    }
}

/// The key of a job, whether it holds it or not.
pub fn of(body: &Body) -> Option<Vec<u8>> {
    unique::of_body(body).map(|(key, _)| key)
}

/// The states in which the job holds its key; None: it has no key.
pub fn mask(body: &Body) -> Option<Mask> {
    unique::of_body(body).map(|(_, mask)| mask)
}

/// Why a job was cancelled that was not claimed in time.
pub const EXPIRED: &str = "it expired before it was claimed";

/// Why a job was cancelled that nobody cancelled.
pub fn reason(holder: i64) -> String {
    format!("its unique key is held by job {holder}")
}

/// 23505, as the index would say it.
pub fn conflict(holder: i64) -> Error {
    Error::new(
        SqlState::UNIQUE_VIOLATION,
        format!("duplicate key value violates unique constraint \"{CONSTRAINT}\""),
    )
    .detail(format!("Job {holder} holds the unique key."))
    .constraint(CONSTRAINT)
}
