//! Receipts: 38 bits of 10 ms ticks since 2025 (the epoch), 25 bits of counter.
//!
//! A plain counter would be repeated after a restore to an earlier time; the clock
//! in the high part makes that impossible as long as an epoch is committed before
//! its first receipt leaves the server.

pub const COUNTER_BITS: u32 = 25;
pub const PER_EPOCH: i64 = 1 << COUNTER_BITS;
/// 2025-01-01 in microseconds of the Postgres clock, which begins in 2000.
const START: i64 = 9_132 * 86_400 * 1_000_000;
const TICK: i64 = 10_000;
const MAX_EPOCH: i64 = (1 << 38) - 1;

/// The epoch to commit: past every stored one, and not behind the clock.
/// None once the 38 bits are used up (in the year 2112).
pub fn next_epoch(stored: Option<i64>, now: i64) -> Option<i64> {
    let clock = now.saturating_sub(START).div_euclid(TICK).max(1);
    let epoch = stored.map_or(clock, |s| clock.max(s.saturating_add(1)));
    (epoch <= MAX_EPOCH).then_some(epoch)
}

/// The first receipt of an epoch. Zero is never a receipt.
pub fn first_of(epoch: i64) -> i64 {
    epoch << COUNTER_BITS
}
