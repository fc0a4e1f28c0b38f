//! The settings: api.md's table, and one getter each.
//!
//! Capacities exist only where the library is preloaded (a restart-only setting
//! cannot be defined later: `init_custom_variable` in guc.c is FATAL then), so in a
//! backend that loaded it by itself the getters give the defaults.

use core::time::Duration;

use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};

const MINUTE_MS: i32 = 60_000;
const HOUR_S: i32 = 3_600;
const DAY_S: i32 = 24 * HOUR_S;
/// What a timer can be set to: the longest wait the server itself allows.
const MAX_MS: i32 = i32::MAX;
const GB_KB: i32 = 1024 * 1024;

static ENABLED: GucSetting<bool> = GucSetting::<bool>::new(true);

static MAX_DATABASES: GucSetting<i32> = GucSetting::<i32>::new(16);
static MAX_LANES: GucSetting<i32> = GucSetting::<i32>::new(4_096);
static MAX_CHUNKS: GucSetting<i32> = GucSetting::<i32>::new(65_536);
static MAX_OPEN_CLAIMS: GucSetting<i32> = GucSetting::<i32>::new(131_072);
static MAX_RUNTIMES: GucSetting<i32> = GucSetting::<i32>::new(4_096);
static MAX_TIMERS: GucSetting<i32> = GucSetting::<i32>::new(65_536);

static CLAIM_WAIT_MAX: GucSetting<i32> = GucSetting::<i32>::new(2_000);
static HEARTBEAT_STALENESS: GucSetting<i32> = GucSetting::<i32>::new(90_000);
static RESCUE_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(30_000);
static RESCUE_BATCH_SIZE: GucSetting<i32> = GucSetting::<i32>::new(500);
static RESCUE_PASS_BUDGET: GucSetting<i32> = GucSetting::<i32>::new(1_000);
static RESCUE_PASS_MAX_ROWS: GucSetting<i32> = GucSetting::<i32>::new(1_000_000);
static PROMOTE_BATCH_SIZE: GucSetting<i32> = GucSetting::<i32>::new(4_096);
static ROTATE_INTERVAL: GucSetting<i32> = GucSetting::<i32>::new(MINUTE_MS);
static ROTATE_SIZE: GucSetting<i32> = GucSetting::<i32>::new(GB_KB);
static COMPLETED_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(HOUR_S);
static FAILED_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(72 * HOUR_S);
static DLQ_RETENTION: GucSetting<i32> = GucSetting::<i32>::new(30 * DAY_S);

#[cfg(feature = "debug_points")]
static DEBUG_STEP: GucSetting<Option<std::ffi::CString>> =
    GucSetting::<Option<std::ffi::CString>>::new(None);

/// What `maintenance::debug` shall do.
#[cfg(feature = "debug_points")]
pub fn debug_step() -> Option<String> {
    DEBUG_STEP.get().map(|value| value.to_string_lossy().into_owned())
}

/// Whether the launcher and its workers shall run.
pub fn enabled() -> bool {
    ENABLED.get()
}

pub fn max_databases() -> usize {
    count(&MAX_DATABASES)
}

pub fn max_lanes() -> usize {
    count(&MAX_LANES)
}

pub fn max_chunks() -> usize {
    count(&MAX_CHUNKS)
}

pub fn max_open_claims() -> usize {
    count(&MAX_OPEN_CLAIMS)
}

pub fn max_runtimes() -> usize {
    count(&MAX_RUNTIMES)
}

pub fn max_timers() -> usize {
    count(&MAX_TIMERS)
}

pub fn claim_wait_max() -> Duration {
    millis(&CLAIM_WAIT_MAX)
}

pub fn heartbeat_staleness() -> Duration {
    millis(&HEARTBEAT_STALENESS)
}

pub fn rescue_interval() -> Duration {
    millis(&RESCUE_INTERVAL)
}

pub fn rescue_batch_size() -> usize {
    count(&RESCUE_BATCH_SIZE)
}

/// Never more than half the interval, so that a backlog leaves the worker time for
/// everything else. Zero: one batch an interval.
pub fn rescue_pass_budget() -> Duration {
    millis(&RESCUE_PASS_BUDGET).min(rescue_interval() / 2)
}

/// Zero: one batch an interval.
pub fn rescue_pass_max_rows() -> usize {
    count(&RESCUE_PASS_MAX_ROWS)
}

pub fn promote_batch_size() -> usize {
    count(&PROMOTE_BATCH_SIZE)
}

pub fn rotate_interval() -> Duration {
    millis(&ROTATE_INTERVAL)
}

/// In bytes.
pub fn rotate_size() -> u64 {
    u64::try_from(ROTATE_SIZE.get()).unwrap_or(0) * 1024
}

/// None: kept for ever. Zero: none kept.
pub fn completed_retention() -> Option<Duration> {
    u64::try_from(COMPLETED_RETENTION.get()).ok().map(Duration::from_secs)
}

pub fn failed_retention() -> Duration {
    seconds(&FAILED_RETENTION)
}

pub fn dlq_retention() -> Duration {
    seconds(&DLQ_RETENTION)
}

/// Defines them all. For `_PG_init` while preloading.
pub fn define() {
    GucRegistry::define_bool_guc(
        c"awa.enabled",
        c"Runs the launcher's workers.",
        c"When off, nothing is promoted, rescued, rotated or cleaned up.",
        &ENABLED,
        GucContext::Sighup,
        GucFlags::empty(),
    );
    define_capacities();
    define_timings();
    define_batches();
    define_retentions();
    #[cfg(feature = "debug_points")]
    GucRegistry::define_string_guc(
        c"awa.debug_step",
        c"Makes a maintenance step misbehave: nap, error, raise or panic.",
        c"",
        &DEBUG_STEP,
        GucContext::Sighup,
        GucFlags::empty(),
    );
    reserve_prefix();
}

fn define_capacities() {
    let capacity = |name, short, long, setting, least, most| {
        let flags = GucFlags::empty();
        GucRegistry::define_int_guc(
            name,
            short,
            long,
            setting,
            least,
            most,
            GucContext::Postmaster,
            flags,
        );
    };
    capacity(
        c"awa.max_databases",
        c"Sets the number of databases that can be served.",
        c"Each takes one background worker (see max_worker_processes).",
        &MAX_DATABASES,
        1,
        1_024,
    );
    capacity(
        c"awa.max_lanes",
        c"Sets the number of lanes with jobs in them.",
        c"A lane is one priority of one shard of a queue.",
        &MAX_LANES,
        16,
        1 << 20,
    );
    capacity(
        c"awa.max_chunks",
        c"Sets the number of chunks of 1,024 jobs held in memory.",
        c"Chunks nobody has touched are dropped from memory when these run low.",
        &MAX_CHUNKS,
        64,
        1 << 24,
    );
    capacity(
        c"awa.max_open_claims",
        c"Sets the number of attempts that can be running at a time.",
        c"",
        &MAX_OPEN_CLAIMS,
        64,
        1 << 26,
    );
    capacity(
        c"awa.max_runtimes",
        c"Sets the number of runtimes that can be registered at a time.",
        c"",
        &MAX_RUNTIMES,
        16,
        1 << 20,
    );
    capacity(
        c"awa.max_timers",
        c"Sets the number of retries and short delays timed in memory.",
        c"What does not fit waits in a table. Jobs of serial queues that wait for their turn count too.",
        &MAX_TIMERS,
        64,
        1 << 24,
    );
}

fn define_timings() {
    let timing = |name, short, long, setting, least, context| {
        GucRegistry::define_int_guc(
            name,
            short,
            long,
            setting,
            least,
            MAX_MS,
            context,
            GucFlags::UNIT_MS,
        );
    };
    timing(
        c"awa.claim_wait_max",
        c"Sets the longest time that a function waits for a job or a result.",
        c"A function holds a snapshot while it waits; awa.wait_for_jobs does not.",
        &CLAIM_WAIT_MAX,
        0,
        GucContext::Userset,
    );
    timing(
        c"awa.heartbeat_staleness",
        c"Sets the time without a heartbeat after which a runtime is dead.",
        c"Of runtimes that did not name their own when they registered.",
        &HEARTBEAT_STALENESS,
        1_000,
        GucContext::Sighup,
    );
    timing(
        c"awa.rescue_interval",
        c"Sets the time between two looks for lost attempts.",
        c"A closed session and a passed deadline are noticed at once.",
        &RESCUE_INTERVAL,
        10,
        GucContext::Sighup,
    );
    timing(
        c"awa.rescue_pass_budget",
        c"Sets the time that one rescue pass may take.",
        c"At most half of awa.rescue_interval is used; 0 is one batch an interval.",
        &RESCUE_PASS_BUDGET,
        0,
        GucContext::Sighup,
    );
    timing(
        c"awa.rotate_interval",
        c"Sets the age at which the current segment is sealed.",
        c"Under 10 seconds is for tests: each truncation rewrites catalog rows.",
        &ROTATE_INTERVAL,
        100,
        GucContext::Sighup,
    );
}

fn define_batches() {
    let batch = |name, short, long, setting, least, most| {
        let flags = GucFlags::empty();
        GucRegistry::define_int_guc(
            name,
            short,
            long,
            setting,
            least,
            most,
            GucContext::Sighup,
            flags,
        );
    };
    batch(
        c"awa.rescue_batch_size",
        c"Sets the number of attempts rescued in one transaction.",
        c"",
        &RESCUE_BATCH_SIZE,
        1,
        100_000,
    );
    batch(
        c"awa.rescue_pass_max_rows",
        c"Sets the number of attempts that one rescue pass may rescue.",
        c"0 is one batch an interval.",
        &RESCUE_PASS_MAX_ROWS,
        0,
        i32::MAX,
    );
    batch(
        c"awa.promote_batch_size",
        c"Sets the number of due jobs made available in one transaction.",
        c"",
        &PROMOTE_BATCH_SIZE,
        1,
        1_000_000,
    );
    GucRegistry::define_int_guc(
        c"awa.rotate_size",
        c"Sets the size at which the current segment is sealed.",
        c"",
        &ROTATE_SIZE,
        64,
        i32::MAX,
        GucContext::Sighup,
        GucFlags::UNIT_KB,
    );
}

fn define_retentions() {
    // Seconds, because 30 days of milliseconds do not fit an integer setting.
    let retention = |name, short, long, setting, least| {
        GucRegistry::define_int_guc(
            name,
            short,
            long,
            setting,
            least,
            i32::MAX,
            GucContext::Sighup,
            GucFlags::UNIT_S,
        );
    };
    retention(
        c"awa.completed_retention",
        c"Sets how long completed jobs stay readable.",
        c"0 keeps none, -1 keeps them for ever. A queue can have its own.",
        &COMPLETED_RETENTION,
        -1,
    );
    retention(
        c"awa.failed_retention",
        c"Sets how long failed and cancelled jobs are kept.",
        c"A queue can have its own.",
        &FAILED_RETENTION,
        0,
    );
    retention(
        c"awa.dlq_retention",
        c"Sets how long dead-lettered jobs are kept.",
        c"",
        &DLQ_RETENTION,
        0,
    );
}

fn count(setting: &GucSetting<i32>) -> usize {
    usize::try_from(setting.get()).unwrap_or(0)
}

fn millis(setting: &GucSetting<i32>) -> Duration {
    Duration::from_millis(u64::try_from(setting.get()).unwrap_or(0))
}

fn seconds(setting: &GucSetting<i32>) -> Duration {
    Duration::from_secs(u64::try_from(setting.get()).unwrap_or(0))
}

/// Refuses misspelt names: nothing else may define awa.* from here on.
fn reserve_prefix() {
    // SAFETY: the prefix is a constant C string.
    unsafe { pgrx::pg_sys::MarkGUCPrefixReserved(c"awa".as_ptr()) };
}
