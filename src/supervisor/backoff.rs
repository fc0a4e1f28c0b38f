//! When to start a worker again that ended by itself.

use core::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(60);
/// A worker that lived this long was healthy: what happened before is forgotten.
const HEALTHY: Duration = Duration::from_secs(60);

/// How many times in a row it has failed, now that it failed after `uptime`.
pub fn count(before: u32, uptime: Duration) -> u32 {
    if uptime >= HEALTHY { 1 } else { before.saturating_add(1) }
}

/// Doubles from a tenth of a second to a minute.
pub fn delay(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(1).min(16);
    FIRST.saturating_mul(1 << doublings).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_to_a_minute() {
        assert_eq!(delay(1), FIRST);
        assert_eq!(delay(2), FIRST * 2);
        assert_eq!(delay(11), LONGEST);
        assert_eq!(delay(u32::MAX), LONGEST);
    }

    #[test]
    fn a_healthy_life_starts_the_count_anew() {
        assert_eq!(count(0, Duration::ZERO), 1);
        assert_eq!(count(7, Duration::from_secs(59)), 8);
        assert_eq!(count(7, HEALTHY), 1);
    }
}
