//! Segments that stay although they should be gone: their jobs are found by an index.

use core::cell::Cell;
use core::time::Duration;

use super::{Context, StepReport};
use crate::dispatch;
use crate::domain::entities::SEGMENTS;
use crate::domain::segments as policy;
use crate::error::Result;
use crate::pg::catalog::{self, Leaf};
use crate::pg::{guc, heap, log, xact};
use crate::store::acl;
use crate::store::claim_index::{self, Found};

const LOOK: Duration = Duration::from_secs(30);
/// Larger claim tables of segments whose jobs may still be claimed are left to an operator: who
/// claims one of them waits while the index is built, a millisecond or two for this many blocks.
const SMALL: u32 = 64;

thread_local! {
    /// Segments whose index has been seen to, by their generation.
    static SEEN: Cell<[i64; SEGMENTS]> = const { Cell::new([-1; SEGMENTS]) };
}

/// Makes the index of one segment, and lets those use the function that may.
pub fn run(context: &Context) -> Result<StepReport> {
    let db = dispatch::attach()?;
    let pause = StepReport { did: 0, next: Some(LOOK) };
    if !dispatch::is_open(db) {
        return Ok(pause);
    }
    // Who changes grants may hold them for long.
    let changed = if acl::try_serialize()? { claim_index::refresh_execute()? } else { 0 };
    let kept = guc::completed_retention().map(|kept| kept.as_micros() as i64);
    let patience = match context.forced {
        true => 0,
        false => policy::patience(guc::rotate_interval().as_micros() as i64, kept),
    };
    let (all, now) = (dispatch::with(|d| d.base(db).segments), xact::micros());
    let mut did = changed;
    for (at, segment) in (0..SEGMENTS as u8).zip(&all) {
        let mut seen = SEEN.get();
        if !policy::stays(segment, now, patience) || seen[usize::from(at)] == segment.generation {
            continue;
        }
        let blocks = heap::relation_size_blocks(catalog::leaf(Leaf::Claims, at)?);
        if blocks == 0 || !segment.disposed && blocks > SMALL {
            continue;
        }
        match claim_index::ensure(at)? {
            Found::Busy => continue,
            Found::Made => did += 1,
            Found::Present => {}
            Found::Taken => log::warning(&taken(at)),
        }
        seen[usize::from(at)] = segment.generation;
        SEEN.set(seen);
    }
    Ok(StepReport { did, ..pause })
}

/// What is in the way of an index.
pub fn taken(segment: u8) -> String {
    let name = claim_index::name(segment);
    format!("segment {segment} gets no index of its claims: \"{name}\" is something else")
}
