//! Unique keys that are held, against the states of the jobs that have keys.

use std::collections::{BTreeMap, HashMap};

use crate::domain::entities::{Mark, SEGMENTS, split};
use crate::domain::unique::{Mask, State};
use crate::error::Result;
use crate::pg::snapshot::Snapshot;
use crate::store::body::Body;
use crate::store::evidence::Evidence;
use crate::store::{deferred, dlq, done, kept, unique};

struct Job {
    id: i64,
    key: Vec<u8>,
    mask: Mask,
    state: State,
}

#[derive(Default)]
pub struct Keys {
    held: BTreeMap<Vec<u8>, i64>,
    jobs: Vec<Job>,
}

impl Keys {
    /// * `segments` - what their rows say, one each
    /// * `marks` - what is written about open attempts, by receipt
    pub fn read(segments: &[Evidence], marks: &HashMap<i64, Mark>) -> Result<Self> {
        let mut keys = Self::default();
        unique::read_all(|key, job_id| {
            keys.held.insert(key, job_id);
        })?;
        for (segment, evidence) in (0..SEGMENTS as u8).zip(segments) {
            keys.read_segment(segment, evidence, marks)?;
        }
        deferred::read_all(Snapshot::SelfNow, |row| {
            let state = match row.kind {
                deferred::Kind::Scheduled => State::Scheduled,
                deferred::Kind::Retryable => State::Retryable,
            };
            keys.add(row.job_id, &row.body, state);
            Ok(true)
        })?;
        done::read_all(Snapshot::SelfNow, |row| {
            let state = if row.failed { State::Failed } else { State::Cancelled };
            keys.add(row.job_id, &row.body, state);
            Ok(true)
        })?;
        dlq::read_all(Snapshot::SelfNow, |row| {
            keys.add(row.done.job_id, &row.done.body, State::Failed);
            Ok(true)
        })?;
        kept::read_all(Snapshot::SelfNow, |row| {
            keys.add(row.done.job_id, &row.done.body, State::Completed);
            Ok(true)
        })?;
        Ok(keys)
    }

    fn add(&mut self, id: i64, body: &Body, state: State) {
        if let Some((key, mask)) = unique::of_body(body) {
            self.jobs.push(Job { id, key, mask, state });
        }
    }

    fn read_segment(
        &mut self,
        segment: u8,
        evidence: &Evidence,
        marks: &HashMap<i64, Mark>,
    ) -> Result<()> {
        // Claims of open transactions have moved no key yet.
        let committed = |claim: usize| evidence.claims.get(claim).is_none_or(|c| c.xid.is_none());
        let running: HashMap<i64, State> = evidence
            .open
            .iter()
            .filter(|item| committed(item.claim))
            .map(|item| match marks.get(&item.receipt) {
                Some(mark) if mark.is_parked() => (item.position, State::WaitingExternal),
                _ => (item.position, State::Running),
            })
            .collect();
        unique::of_segment(segment, Snapshot::SelfNow, |job| {
            let (number, offset) = split(job.position);
            let chunk = evidence.chunks.get(&number).copied().unwrap_or_default();
            let state = if chunk.completed.contains(offset) && !chunk.kept.contains(offset) {
                State::Completed
            } else if chunk.disposed.contains(offset) {
                // Another table has the job.
                return;
            } else if let Some(state) = running.get(&job.position) {
                *state
            } else {
                // Released jobs too: their keys are the same before and after their time.
                State::Available
            };
            self.jobs.push(Job { id: job.job_id, key: job.key, mask: job.mask, state });
        })
    }

    /// At most `limit` faults, in words.
    pub fn compare(&self, limit: usize) -> Vec<String> {
        let mut faults = Vec::new();
        let mut holders: HashMap<i64, &Job> = HashMap::new();
        for job in self.jobs.iter().filter(|job| job.mask.has(job.state)) {
            holders.insert(job.id, job);
            let holder = self.held.get(&job.key);
            // A job whose completion began to want the key may have found it taken.
            let may_lack = job.state == State::Completed && !job.mask.has(State::Running);
            if holder != Some(&job.id) && !may_lack {
                faults.push(format!("job {} is {:?} without its key", job.id, job.state));
            }
        }
        for (key, job_id) in &self.held {
            if holders.get(job_id).is_none_or(|job| job.key != *key) {
                faults.push(format!("a key is held by job {job_id}, whose state does not hold it"));
            }
        }
        faults.truncate(limit);
        faults
    }
}
