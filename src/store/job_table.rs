//! What the tables of jobs outside the segments have in common: a key that is the job's id, and
//! where jobs have ended, an index by the time.

use crate::error::{Error, Result};
use crate::pg::catalog;
use crate::pg::heap::{Row, Table};
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::spi;

pub struct JobTable {
    pub name: &'static str,
    /// Its primary key.
    pub key: &'static str,
}

impl JobTable {
    fn open(&self) -> Result<Table> {
        Ok(Table::open(catalog::relation(self.name)?, LockMode::AccessShare))
    }

    /// One job by its id.
    pub fn find<T>(
        &self,
        job_id: i64,
        snapshot: Snapshot,
        read: impl Fn(&Row) -> Result<T>,
    ) -> Result<Option<T>> {
        let mut found = None;
        let table = self.open()?;
        table.index_range(catalog::relation(self.key)?, job_id, job_id, snapshot, |row| {
            found = Some(read(row)?);
            Ok(false)
        })?;
        table.close_release_lock();
        Ok(found)
    }

    /// Every job that a snapshot sees, as long as `take` wants more.
    pub fn read_all<T>(
        &self,
        snapshot: Snapshot,
        read: impl Fn(&Row) -> Result<T>,
        mut take: impl FnMut(T) -> Result<bool>,
    ) -> Result<()> {
        let table = self.open()?;
        table.scan(snapshot, |row| take(read(row)?))?;
        table.close_release_lock();
        Ok(())
    }

    /// Up to `limit` of the jobs that came to their end until then, oldest first.
    /// Those that open transactions of others have deleted are left out.
    ///
    /// * `index` - by that time
    /// * `is_it` - of the row: others are not copied
    pub fn read_until<T>(
        &self,
        index: &'static str,
        until: i64,
        limit: usize,
        is_it: impl Fn(&Row) -> bool,
        read: impl Fn(&Row) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut found = Vec::new();
        let table = self.open()?;
        let index = catalog::relation(index)?;
        table.index_range(index, i64::MIN, until, Snapshot::SelfNow, |row| {
            if !row.is_held() && is_it(row) {
                found.push(read(row)?);
            }
            Ok(found.len() < limit)
        })?;
        table.close_release_lock();
        Ok(found)
    }
}

/// Runs a DELETE of jobs by their ids that returns those it deleted.
pub fn delete(statement: &'static str, job_ids: &[i64]) -> Result<Vec<i64>> {
    if job_ids.is_empty() {
        return Ok(Vec::new());
    }
    spi::as_owner(|spi| {
        let rows = spi.query(statement, &[spi::Arg::bigint_array(job_ids)])?;
        rows.collect(|row| row.i64(1).ok_or_else(|| Error::internal("a job id is null")))
    })
}
