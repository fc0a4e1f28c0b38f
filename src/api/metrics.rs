//! The metrics view.
//!
//! Names, units and kinds follow the rules of Prometheus: base units, counters end in
//! `_total`, a histogram is its buckets (cumulative, by `le`), its sum and its count.

use serde_json::{Value, json};

use super::access;
use super::queue::read_stats;
use crate::dispatch;
use crate::domain::entities::{Db, SegmentState};
use crate::domain::rescue::{BOUNDS, Kind, PassEnd, Sizes};
use crate::error::Result;
use crate::pg::call::{Call, Returned, Rows, sql_function};
use crate::pg::datum::ToDatum;
use crate::pg::xact;
use crate::store::acl::Profile;
use crate::store::segments;

sql_function!(awa_metrics_rows, metrics);

struct Metrics {
    rows: Rows,
}

impl Metrics {
    fn push(&mut self, name: &str, kind: &str, labels: &Value, value: f64) -> Result<()> {
        self.rows.push(&[
            Some(name.to_datum()),
            Some(kind.to_datum()),
            Some(labels.to_datum()),
            Some(value.to_datum()),
        ])
    }

    fn gauge(&mut self, name: &str, labels: &Value, value: f64) -> Result<()> {
        self.push(name, "gauge", labels, value)
    }

    fn counter(&mut self, name: &str, labels: &Value, value: f64) -> Result<()> {
        self.push(name, "counter", labels, value)
    }

    fn histogram(&mut self, name: &str, labels: &Value, sizes: &Sizes) -> Result<()> {
        let mut cumulative = 0;
        let bucket = format!("{name}_bucket");
        for (bound, count) in BOUNDS.iter().zip(sizes.buckets) {
            cumulative += count;
            let labels = with(labels, "le", json!(bound.to_string()));
            self.push(&bucket, "histogram", &labels, cumulative as f64)?;
        }
        let labels_inf = with(labels, "le", json!("+Inf"));
        self.push(&bucket, "histogram", &labels_inf, sizes.count as f64)?;
        self.push(&format!("{name}_sum"), "histogram", labels, sizes.sum as f64)?;
        self.push(&format!("{name}_count"), "histogram", labels, sizes.count as f64)
    }
}

fn with(labels: &Value, name: &str, value: Value) -> Value {
    let mut labels = labels.clone();
    if let Value::Object(map) = &mut labels {
        map.insert(name.to_owned(), value);
    }
    labels
}

/// What a scraper of metrics wants to know: of queues that the caller may read, and of the
/// database as a whole for who may read every queue.
fn metrics(call: &mut Call) -> Result<Returned> {
    let mut metrics = Metrics { rows: call.rows()? };
    let now = xact::micros();
    queue_metrics(&mut metrics, now)?;
    if access::may("", Profile::Reader)? {
        let db = dispatch::with_open(|_, db| db)?;
        capacity_metrics(&mut metrics)?;
        ring_metrics(&mut metrics, db)?;
        rescue_metrics(&mut metrics, db, now)?;
        let aged = dispatch::with(|d| d.base(db).aged_claims);
        metrics.counter("awa_dispatch_aged_claims_total", &json!({}), aged as f64)?;
    }
    Ok(Returned::Void)
}

fn queue_metrics(metrics: &mut Metrics, now: i64) -> Result<()> {
    for (queue, stats) in read_stats(now)? {
        if !access::may(&queue, Profile::Reader)? {
            continue;
        }
        let counts = stats.counts;
        for (state, jobs) in [
            ("scheduled", counts.scheduled),
            ("available", counts.available),
            ("running", counts.running),
            ("retryable", counts.retryable),
            ("waiting_external", counts.waiting_external),
        ] {
            let labels = json!({ "queue": queue, "state": state });
            metrics.gauge("awa_queue_depth", &labels, jobs as f64)?;
        }
        let labels = json!({ "queue": queue });
        let lag = stats.oldest.map_or(0.0, |born| (now - born).max(0) as f64 / 1e6);
        metrics.gauge("awa_queue_lag_seconds", &labels, lag)?;
        metrics.gauge("awa_job_in_flight", &labels, counts.running as f64)?;
        metrics.counter("awa_job_completed_total", &labels, counts.completed as f64)?;
        metrics.counter("awa_job_failed_total", &labels, counts.failed as f64)?;
        metrics.counter("awa_job_cancelled_total", &labels, counts.cancelled as f64)?;
    }
    Ok(())
}

/// How much of each fixed capacity of the server is used.
fn capacity_metrics(metrics: &mut Metrics) -> Result<()> {
    let uses = dispatch::with(|d| {
        [
            ("awa.max_lanes", d.lanes.used(), d.lanes.capacity()),
            ("awa.max_chunks", d.chunks.used(), d.chunks.capacity()),
            ("awa.max_open_claims", d.items.used(), d.items.capacity()),
            ("awa.max_runtimes", d.runtimes.used(), d.runtimes.capacity()),
            ("awa.max_timers", d.releases.used(), d.releases.capacity()),
        ]
    });
    for (setting, used, capacity) in uses {
        let labels = json!({ "setting": setting });
        metrics.gauge("awa_capacity_used", &labels, used as f64)?;
        metrics.gauge("awa_capacity_limit", &labels, capacity as f64)?;
    }
    Ok(())
}

fn ring_metrics(metrics: &mut Metrics, db: Db) -> Result<()> {
    let (segments, current) = dispatch::with(|d| (d.base(db).segments, d.base(db).current));
    metrics.gauge("awa_ring_current_slot", &json!({}), f64::from(current))?;
    let turns: i64 = segments.iter().map(|segment| segment.generation).sum();
    metrics.counter("awa_ring_generation_total", &json!({}), turns as f64)?;
    for (name, state) in [
        ("free", SegmentState::Free),
        ("current", SegmentState::Current),
        ("sealed", SegmentState::Sealed),
    ] {
        let count = segments.iter().filter(|segment| segment.state == state).count();
        metrics.gauge("awa_ring_segments", &json!({ "state": name }), count as f64)?;
    }
    metrics.gauge("awa_ring_bytes", &json!({}), segments::disk_bytes()? as f64)?;
    Ok(())
}

fn rescue_metrics(metrics: &mut Metrics, db: Db, now: i64) -> Result<()> {
    let passes = dispatch::with(|d| d.base(db).rescues);
    for kind in Kind::ALL {
        for end in PassEnd::ALL {
            let labels = json!({ "kind": kind.name(), "pass_end": end.name() });
            let sizes = &passes[kind as usize].sizes[end as usize];
            metrics.histogram("awa_maintenance_rescue_pass_size", &labels, sizes)?;
        }
        let oldest = oldest_lost(db, kind, now);
        let age = oldest.map_or(0.0, |claimed_at| (now - claimed_at).max(0) as f64 / 1e6);
        let labels = json!({ "kind": kind.name() });
        let name = "awa_maintenance_rescue_oldest_attempt_age_seconds";
        metrics.gauge(name, &labels, age)?;
    }
    Ok(())
}

/// When the oldest attempt was claimed that waits for a rescue. A few claims a section.
fn oldest_lost(db: Db, kind: Kind, now: i64) -> Option<i64> {
    let (mut oldest, mut from) = (None, 0);
    loop {
        let (found, next) = dispatch::with(|d| d.oldest_lost(db, kind, now, from));
        oldest = match (oldest, found) {
            (Some(known), Some(found)) => Some(i64::min(known, found)),
            (known, found) => known.or(found),
        };
        match next {
            Some(next) => from = next,
            None => return oldest,
        }
    }
}
