//! The ordering keys of jobs, which only their bodies know: a claim from a serial queue reads
//! those of the jobs that come next before it takes any (see `domain::dispatcher::ordering`).

use crate::domain::dispatcher::{Head, Unsorted};
use crate::domain::entities::Db;
use crate::domain::ordering;
use crate::error::{Error, Result};
use crate::pg::{datum, latch};
use crate::store::body;

/// Bodies that are read at a time: at first, and at the most.
const FEW: usize = 16;
const MANY: usize = 1024;
/// Keys that a claim remembers.
const KNOWN: usize = 8 * MANY;
/// Rounds in a row in which others took all the jobs before their keys were read.
const PATIENCE: usize = 1000;

/// What a claim has read, and what it is asked to read. Nothing is allocated before that.
#[derive(Default)]
pub struct Keys {
    known: Vec<(i64, u64)>,
    /// Filled by the dispatcher as far as there is room.
    pub heads: Vec<Head>,
    pub unsorted: Vec<Unsorted>,
    vain: usize,
}

impl Keys {
    /// By position.
    pub fn known(&self) -> &[(i64, u64)] {
        &self.known
    }

    /// Reads the keys of `heads`, and makes room for more of them the next time.
    ///
    /// * `wanted` - jobs
    pub fn read_heads(&mut self, wanted: usize) -> Result<()> {
        latch::serve_interrupts();
        if self.known.len() > KNOWN {
            self.known.clear();
        }
        let before = self.known.len();
        for run in self.heads.chunk_by(|a, b| a.segment == b.segment) {
            let Some(Head { segment, .. }) = run.first() else { continue };
            let positions: Vec<i64> = run.iter().map(|head| head.position).collect();
            let keys = read(*segment, &positions)?;
            // One without a body was claimed and has ended meanwhile.
            let found = positions.iter().zip(keys);
            self.known.extend(found.filter_map(|(at, key)| key.map(|key| (*at, key))));
        }
        let is_vain = self.known.len() == before && !self.heads.is_empty();
        self.vain = if is_vain { self.vain + 1 } else { 0 };
        if self.vain > PATIENCE {
            return Err(Error::internal("a job that memory knows has no body"));
        }
        self.known.sort_unstable();
        self.known.dedup();
        let room = (2 * self.heads.capacity()).max(wanted).clamp(FEW, MANY);
        self.heads.clear();
        self.heads.reserve(room);
        Ok(())
    }

    /// Tells memory the keys of `unsorted`.
    pub fn sort(&mut self, db: Db) -> Result<()> {
        latch::serve_interrupts();
        for run in self.unsorted.chunk_by(|a, b| a.segment == b.segment) {
            let Some(Unsorted { segment, .. }) = run.first() else { continue };
            let positions: Vec<i64> = run.iter().map(|item| item.position).collect();
            let keys = read(*segment, &positions)?;
            super::with(|d| {
                for (item, key) in run.iter().zip(&keys) {
                    // Without a body it has ended.
                    if let Some(key) = key {
                        d.sort(db, item.receipt, *key);
                    }
                }
            });
        }
        self.unsorted.clear();
        self.unsorted.reserve(MANY);
        Ok(())
    }
}

fn read(segment: u8, positions: &[i64]) -> Result<Vec<Option<u64>>> {
    let keys = body::read_ordering_keys(segment, positions)?;
    let hash = |key: datum::Datum| ordering::hash(&datum::own_bytes(key));
    Ok(keys.into_iter().map(|found| found.map(|key| key.map_or(0, hash))).collect())
}
