//! Unique keys that are held, and by whom.
//!
//! A key is taken and freed by the transaction that moves its job from one state to
//! another, so who comes second waits for the end of that transaction and then sees what
//! became of the key. Nothing here depends on the snapshot of the transaction: a key that
//! was taken after a repeatable read began is taken all the same, and no serialization
//! failure comes of it.

use std::cell::Cell;

use crate::domain::unique::Mask;
use crate::error::Result;
use crate::pg::catalog::{self, Leaf};
use crate::pg::datum::{self, ToDatum};
use crate::pg::heap::{Row, Table, Tid};
use crate::pg::lock::{self, LockMode};
use crate::pg::snapshot::Snapshot;
use crate::pg::unique::{Look, look};
use crate::pg::xact;

use super::body::{Body, column as body};

/// The constraint that clients are told.
pub const CONSTRAINT: &str = "idx_awa_jobs_unique";

/// What became of an attempt to take a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taking {
    Taken,
    /// By this job.
    Held(i64),
    /// A transaction that is still open decides.
    Open,
}

/// The table of keys, open for changes.
pub struct Keys {
    table: Table,
    index: u32,
}

impl Keys {
    pub fn open() -> Result<Self> {
        Ok(Self {
            table: Table::open(catalog::relation("job_unique_claims")?, LockMode::RowExclusive),
            index: catalog::relation(CONSTRAINT)?,
        })
    }

    pub fn is_empty(&self) -> bool {
        self.table.blocks() == 0
    }

    fn look(&self, key: &[u8]) -> Look<(i64, Tid)> {
        look(&self.table, self.index, key, |row| (row.i64(2).unwrap_or(0), row.tid()))
    }

    /// Takes a key for a job.
    ///
    /// Looking and writing are one step under a short lock on the key, so that the plain
    /// unique check never finds another row: it would raise where we have an answer. No
    /// transaction is waited for while the lock is held.
    ///
    /// * `may_wait` - for the end of an open transaction that has changed the key
    pub fn take(&self, key: &[u8], job_id: i64, may_wait: bool) -> Result<Taking> {
        loop {
            let locked = lock::lock_key(self.index, hash(key));
            let xid = match self.look(key) {
                Look::Absent => {
                    self.table.insert(&[Some(key.to_datum()), Some(job_id.to_datum())])?;
                    return Ok(Taking::Taken);
                }
                Look::Present((holder, _)) if holder == job_id => return Ok(Taking::Taken),
                Look::Present((holder, _)) => return Ok(Taking::Held(holder)),
                Look::Open(xid) => xid,
            };
            drop(locked);
            if !may_wait {
                return Ok(Taking::Open);
            }
            AWAITED.set(Some(xid));
            xact::wait_for_xid(xid);
            AWAITED.set(None);
        }
    }

    /// Frees a key, if this job holds it.
    pub fn free(&self, key: &[u8], job_id: i64) {
        if let Look::Present((holder, tid)) = self.look(key)
            && holder == job_id
        {
            self.table.delete(tid);
        }
    }
}

thread_local! {
    /// The transaction that is waited for because of a key.
    static AWAITED: Cell<Option<u32>> = const { Cell::new(None) };
}

/// The transaction for which `take` waited when an error ended it; told once.
pub fn take_awaited() -> Option<u32> {
    AWAITED.take()
}

/// The job that holds a key. Waits for an open transaction that takes or frees it.
pub fn holder(key: &[u8]) -> Result<Option<i64>> {
    let keys = Keys::open()?;
    loop {
        match keys.look(key) {
            Look::Absent => return Ok(None),
            Look::Present((holder, _)) => return Ok(Some(holder)),
            Look::Open(xid) => xact::wait_for_xid(xid),
        }
    }
}

/// FNV-1a: any spread will do, two keys under one lock are none the worse for it.
pub(super) fn hash(key: &[u8]) -> u32 {
    key.iter().fold(0x811c_9dc5, |hash, byte| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193))
}

/// The key of a job and the states in which it holds it. A key without states is not
/// unique.
pub fn of_body(body: &Body) -> Option<(Vec<u8>, Mask)> {
    let (key, states) = (body.unique_key?, body.unique_states?);
    Some((datum::own_bytes(key), Mask(datum::own_bits8(states).0)))
}

/// A body in a segment that has a key.
pub struct Keyed {
    pub position: i64,
    pub job_id: i64,
    pub key: Vec<u8>,
    pub mask: Mask,
}

fn keyed(row: &Row) -> Option<Keyed> {
    let mask = Mask(row.bits8(body::UNIQUE_STATES)?.0);
    let key = row.bytea(body::UNIQUE_KEY)?;
    let position = row.i64(body::POSITION)?;
    Some(Keyed { position, job_id: row.i64(body::JOB_ID).unwrap_or(position), key, mask })
}

/// The bodies of a segment that have keys.
pub fn of_segment(segment: u8, snapshot: Snapshot, mut take: impl FnMut(Keyed)) -> Result<()> {
    let table = Table::open(catalog::leaf(Leaf::Ready, segment)?, LockMode::AccessShare);
    table.scan(snapshot, |row| {
        if let Some(keyed) = keyed(row) {
            take(keyed);
        }
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(())
}

/// Every key that is held, and by which job.
pub fn read_all(mut take: impl FnMut(Vec<u8>, i64)) -> Result<()> {
    let table = Table::open(catalog::relation("job_unique_claims")?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        take(row.bytea(1).unwrap_or_default(), row.i64(2).unwrap_or(0));
        Ok(true)
    })?;
    table.close_release_lock();
    Ok(())
}
