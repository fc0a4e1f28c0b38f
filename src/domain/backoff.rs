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
    /// Any attempt number is fine: the growth saturates before it can overflow.
    ///
    /// * `random` - in [0, 1)
    pub fn delay(&self, attempt: i16, random: f64) -> i64 {
        let max = self.max as f64;
        let grown = (self.base as f64 * self.factor.powi(i32::from(attempt))).min(max);
        let delay = (grown + grown * self.jitter * random).min(max);
        if delay.is_finite() { delay.max(0.0) as i64 } else { self.max }
    }
}
