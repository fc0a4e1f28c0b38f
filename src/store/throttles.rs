//! Until when no other job is accepted for a key.

use crate::error::Result;
use crate::pg::catalog;
use crate::pg::datum::{Timestamp, ToDatum};
use crate::pg::heap::{Row, Table, Tid};
use crate::pg::lock::{self, LockMode};
use crate::pg::spi;
use crate::pg::unique::{Look, look};
use crate::pg::xact;

use super::unique::hash;

#[derive(Clone, Copy, Debug)]
struct Window {
    tid: Tid,
    job_id: i64,
    until: i64,
}

impl Window {
    fn from_row(row: &Row) -> Self {
        let until = row.micros(3).unwrap_or(i64::MIN);
        Self { tid: row.tid(), job_id: row.i64(2).unwrap_or(0), until }
    }
}

/// A window that was opened, and the one before it.
#[derive(Debug)]
pub struct Opened {
    tid: Tid,
    before: Option<Window>,
}

/// What became of an attempt to open a window.
#[derive(Debug)]
pub enum Opening {
    Opened(Opened),
    /// The one of this job is still open.
    Throttled(i64),
}

/// The table of windows, open for changes.
pub struct Throttles {
    table: Table,
    index: u32,
}

impl Throttles {
    pub fn open() -> Result<Self> {
        Ok(Self {
            table: Table::open(catalog::relation("job_throttles")?, LockMode::RowExclusive),
            index: catalog::relation("job_throttles_pkey")?,
        })
    }

    /// Opens the window of a key for a job, as `unique::Keys::take` takes a key: who comes
    /// second waits for the end of the transaction that was first.
    pub fn begin(&self, key: &[u8], job_id: i64, now: i64, until: i64) -> Result<Opening> {
        loop {
            let locked = lock::lock_key(self.index, hash(key));
            let before = match look(&self.table, self.index, key, Window::from_row) {
                Look::Absent => None,
                Look::Present(window) if window.until > now => {
                    return Ok(Opening::Throttled(window.job_id));
                }
                Look::Present(window) => Some(window),
                Look::Open(xid) => {
                    drop(locked);
                    xact::wait_for_xid(xid);
                    continue;
                }
            };
            if let Some(before) = before {
                self.table.delete(before.tid);
            }
            let tid = self.insert(key, job_id, until)?;
            return Ok(Opening::Opened(Opened { tid, before }));
        }
    }

    fn insert(&self, key: &[u8], job_id: i64, until: i64) -> Result<Tid> {
        let until = Timestamp(until).to_datum();
        self.table.insert(&[Some(key.to_datum()), Some(job_id.to_datum()), Some(until)])
    }

    /// The job was not accepted after all.
    pub fn take_back(&self, key: &[u8], opened: Opened) -> Result<()> {
        self.table.delete(opened.tid);
        if let Some(Window { job_id, until, .. }) = opened.before {
            self.insert(key, job_id, until)?;
        }
        Ok(())
    }
}

/// Who writes is not waited for.
const SWEEP: &str = "
DELETE FROM awa.job_throttles WHERE unique_key OPERATOR(pg_catalog.=) ANY (ARRAY(
    SELECT unique_key FROM awa.job_throttles
    WHERE until OPERATOR(pg_catalog.<) pg_catalog.clock_timestamp()
    LIMIT 10000 FOR UPDATE SKIP LOCKED))";

/// Forgets windows that have closed.
pub fn sweep() -> Result<()> {
    spi::as_owner(|spi| spi.execute(SWEEP, &[]).map(|_| ()))
}
