//! prepare_queue, pause_queue, resume_queue, queue_stats.

use super::{access, args};
use crate::dispatch;
use crate::domain::dispatcher::Dispatcher;
use crate::domain::entities::{Counts, Db, QueueName};
use crate::domain::table::NIL;
use crate::error::Result;
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::datum::{Interval, ToDatum};
use crate::pg::xact;
use crate::store::acl::Profile;
use crate::store::queues;

sql_function!(awa_prepare_queue, prepare);
sql_function!(awa_pause_queue, pause);
sql_function!(awa_resume_queue, resume);
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

struct Stats {
    queue: String,
    paused: bool,
    counts: Counts,
    oldest: Option<i64>,
    rates: (f64, f64),
}

type Seen = (QueueName, bool, Counts, Option<i64>, (f64, f64));

/// The next queue in memory, and where to go on; it is shown if anybody used it.
fn look(d: &mut Dispatcher<'_>, db: Db, from: u32, now: i64) -> Option<(u32, Option<Seen>)> {
    let at = d.queues.next_used(from)?;
    let queue = &d.queues[at];
    let used = queue.lanes != NIL || queue.stored || queue.counts != Counts::default();
    let rates = (queue.enqueued.per_second(now), queue.completed.per_second(now));
    let seen = (queue.copy_name(), queue.paused, queue.counts, d.oldest_ready(at), rates);
    Some((at + 1, (queue.db == db && used).then_some(seen)))
}

fn stats(call: &mut Call) -> Result<Returned> {
    let mut rows = call.rows()?;
    // Queues that have a row but were not used since the start are in no memory yet.
    for total in queues::read_totals(crate::pg::snapshot::Snapshot::Active)? {
        queues::ensure_loaded(&total.queue)?;
    }
    let now = xact::micros();
    let mut found: Vec<Stats> = Vec::new();
    let mut from = 0;
    // A queue a section: nothing is allocated under the lock.
    while let Some((next, seen)) = dispatch::with_open(|d, db| look(d, db, from, now))? {
        from = next;
        if let Some((name, paused, counts, oldest, rates)) = seen {
            found.push(Stats { queue: name.as_str().to_owned(), paused, counts, oldest, rates });
        }
    }
    found.sort_by(|a, b| a.queue.cmp(&b.queue));
    for row in found {
        if !access::may(&row.queue, Profile::Reader)? {
            continue;
        }
        let Counts { scheduled, available, running, retryable, completed, failed, cancelled } =
            row.counts;
        rows.push(&[
            Some(row.queue.to_datum()),
            Some(row.paused.to_datum()),
            Some(scheduled.to_datum()),
            Some(available.to_datum()),
            Some(running.to_datum()),
            Some(retryable.to_datum()),
            Some(0_i64.to_datum()),
            Some(0_i64.to_datum()),
            Some(completed.to_datum()),
            Some(failed.to_datum()),
            Some(cancelled.to_datum()),
            row.oldest.map(|born| Interval::of_micros((now - born).max(0)).to_datum()),
            Some(row.rates.0.to_datum()),
            Some(row.rates.1.to_datum()),
        ])?;
    }
    Ok(Returned::Void)
}
