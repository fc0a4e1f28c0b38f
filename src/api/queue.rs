//! prepare_queue, pause_queue, resume_queue, drain_queue, queue_stats.

use std::collections::BTreeMap;

use super::{access, args};
use crate::dispatch;
use crate::domain::dispatcher::Dispatcher;
use crate::domain::entities::{Counts, Db, QueueName, SEGMENTS};
use crate::domain::table::NIL;
use crate::error::Result;
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{Interval, ToDatum};
use crate::pg::snapshot::Snapshot;
use crate::pg::{latch, xact};
use crate::store::acl::Profile;
use crate::store::changes::{self, Change};
use crate::store::segments::{self, Known};
use crate::store::{identity, lanes, queues};

sql_function!(awa_prepare_queue, prepare);
sql_function!(awa_pause_queue, pause);
sql_function!(awa_resume_queue, resume);
sql_function!(awa_drain_queue, drain);
sql_function!(awa_queue_stats_rows, stats);

fn prepare(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.prepare_queue()")?;
    let queue = args::queue(call, 0)?;
    access::check(&queue, Profile::Operator)?;
    queues::create(&queue)?;
    Ok(Returned::Void)
}

fn pause(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.pause_queue()")?;
    let queue = args::queue(call, 0)?;
    access::check(&queue, Profile::Operator)?;
    Ok(Returned::value(queues::set_paused(&queue, true, call.text(1).as_deref())?))
}

fn resume(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.resume_queue()")?;
    let queue = args::queue(call, 0)?;
    access::check(&queue, Profile::Operator)?;
    Ok(Returned::value(queues::set_paused(&queue, false, None)?))
}

fn drain(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.drain_queue()")?;
    let queue = args::queue(call, 0)?;
    access::check(&queue, Profile::Operator)?;
    queues::ensure_exists(&queue)?;
    Ok(Returned::value(dispatch::cancel::drain(&queue)? as i64))
}

#[derive(Clone, Copy, Default)]
pub(super) struct Stats {
    /// As claims see it; None: memory has not read the row.
    paused: Option<bool>,
    pub counts: Counts,
    /// When the oldest job that waits to be claimed became available.
    pub oldest: Option<i64>,
    rates: (f64, f64),
    pub dead: i64,
}

/// The next queue in memory, and where to go on; it is shown if anybody used it.
fn look(
    d: &mut Dispatcher<'_>,
    db: Db,
    from: u32,
    now: i64,
) -> Option<(u32, Option<(QueueName, Stats)>)> {
    let at = d.queues.next_used(from)?;
    let queue = &d.queues[at];
    let used = queue.lanes != NIL || queue.counts != Counts::default();
    let stats = Stats {
        paused: queue.loaded.then_some(queue.paused),
        counts: queue.counts,
        oldest: d.oldest_ready(at),
        rates: (queue.enqueued.per_second(now), queue.completed.per_second(now)),
        dead: 0,
    };
    Some((at + 1, (queue.db == db && used).then(|| (queue.copy_name(), stats))))
}

/// How often ends of each segment went from memory to the totals, in its generation.
type Counted = [(i64, u32); SEGMENTS];

fn counted(d: &mut Dispatcher<'_>, db: Db) -> (u64, Counted) {
    let database = d.base(db);
    (database.counts, database.segments.map(|s| (s.generation, s.counted)))
}

/// What memory says of each queue, while no end went from it to the totals.
fn read_memory(now: i64) -> Result<(BTreeMap<String, Stats>, Counted)> {
    loop {
        let before = dispatch::with_open(counted)?;
        let mut found = BTreeMap::new();
        let mut from = 0;
        // A queue a section: nothing is allocated under the lock.
        while let Some((next, seen)) = dispatch::with_open(|d, db| look(d, db, from, now))? {
            from = next;
            if let Some((name, stats)) = seen {
                found.insert(name.as_str().to_owned(), stats);
            }
        }
        if dispatch::with_open(counted)? == before {
            return Ok((found, before.1));
        }
    }
}

/// How often tables that do not fit memory are read again, a millisecond apart. They always
/// fit soon, except in a transaction that truncates a segment itself.
const TRIES: usize = 200;

/// Memory and totals of one moment. The tables are read after memory: ends that went from
/// one to the other in between are in both and are taken off again.
pub(super) fn read_stats(now: i64) -> Result<BTreeMap<String, Stats>> {
    let mut tries = 0;
    loop {
        tries += 1;
        let (mut stats, counted) = read_memory(now)?;
        let known = segments::read_known()?;
        let totals = queues::read_totals()?;
        let after = segments::read_known()?;
        let stands = |(before, after): (&Known, &Known)| before.writer == after.writer;
        let behind =
            |known: &Known, counted: &(i64, u32)| known.counted.times.wrapping_sub(counted.1);
        let fits = |(known, counted): (&Known, &(i64, u32))| {
            known.generation == counted.0 && behind(known, counted) <= 1
        };
        let same = known.iter().zip(&after).all(stands) && known.iter().zip(&counted).all(fits);
        if !same && tries < TRIES {
            latch::wait(1);
            continue;
        }
        let mut names = None;
        for (known, counted) in known.iter().zip(&counted) {
            if behind(known, counted) != 1 || known.generation != counted.0 {
                continue;
            }
            let names = match &names {
                Some(names) => names,
                None => names.insert(lanes::read_all(Snapshot::SelfNow)?),
            };
            for (lane, ends) in &known.counted.last {
                let Some(lane) = names.get(lane) else { continue };
                let counts = &mut stats.entry(lane.queue.clone()).or_default().counts;
                counts.completed -= ends.completed;
                counts.failed -= ends.failed;
                counts.cancelled -= ends.cancelled;
            }
        }
        for total in totals {
            let entry = stats.entry(total.queue).or_default();
            entry.paused = entry.paused.or(Some(total.paused));
            entry.counts.completed += total.ends.completed;
            entry.counts.failed += total.ends.failed;
            entry.counts.cancelled += total.ends.cancelled;
        }
        for (queue, change) in changes::read()?.into_iter().filter(|(_, c)| *c != Change::default())
        {
            let entry = stats.entry(queue).or_default();
            entry.dead = change.letters;
            entry.counts.cancelled += change.cancelled;
        }
        return Ok(stats);
    }
}

fn stats(call: &mut Call) -> Result<Returned> {
    let mut rows = call.rows()?;
    let now = xact::micros();
    let paused_without_a_row = identity::is_copy()?;
    for (queue, stats) in read_stats(now)? {
        if !access::may(&queue, Profile::Reader)? {
            continue;
        }
        let Counts {
            scheduled,
            available,
            running,
            waiting_external,
            retryable,
            completed,
            failed,
            cancelled,
        } = stats.counts;
        rows.push(&[
            Some(queue.to_datum()),
            Some(stats.paused.unwrap_or(paused_without_a_row).to_datum()),
            Some(scheduled.to_datum()),
            Some(available.to_datum()),
            Some(running.to_datum()),
            Some(retryable.to_datum()),
            Some(waiting_external.to_datum()),
            Some(stats.dead.to_datum()),
            Some(completed.to_datum()),
            Some(failed.to_datum()),
            Some(cancelled.to_datum()),
            stats.oldest.map(|born| Interval::of_micros((now - born).max(0)).to_datum()),
            Some(stats.rates.0.to_datum()),
            Some(stats.rates.1.to_datum()),
        ])?;
    }
    Ok(Returned::Void)
}
