//! How long a failed attempt waits for the next.

#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    /// Microseconds.
    pub base: i64,
    pub factor: f64,
    pub jitter: f64,
    /// Microseconds.
    pub max: i64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { base: 1_000_000, factor: 2.0, jitter: 0.25, max: 86_400_000_000 }
    }
}

impl Backoff {
    /// base * factor^attempt plus up to `jitter` of it, at most `max`, microseconds.
    ///
    /// Any attempt number is fine: what overflows is `max`. No base is no delay, though
    /// zero times infinity is not a number.
    ///
    /// * `random` - in [0, 1)
    pub fn delay(&self, attempt: i16, random: f64) -> i64 {
        if self.base <= 0 || self.max <= 0 {
            return 0;
        }
        let max = self.max as f64;
        let grown = (self.base as f64 * self.factor.powi(i32::from(attempt))).min(max);
        let delay = (grown + grown * self.jitter * random).min(max);
        // `max` as a float may be above `max`.
        if delay.is_finite() { (delay.max(0.0) as i64).min(self.max) } else { self.max }
    }
}
