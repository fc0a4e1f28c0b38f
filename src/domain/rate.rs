//! How often something happens: an average that forgets exponentially, so that it needs no
//! timer and nobody to look after it.

/// Microseconds after which an event weighs 1/e.
const MEMORY: f64 = 60_000_000.0;

#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct Rate {
    weight: f64,
    at: i64,
}

impl Rate {
    /// `count` events happened.
    pub fn add(&mut self, count: u32, now: i64) {
        if now > self.at {
            self.weight *= decay(now - self.at);
            self.at = now;
        }
        self.weight += f64::from(count);
    }

    /// Events a second.
    pub fn per_second(&self, now: i64) -> f64 {
        self.weight * decay((now - self.at).max(0)) / (MEMORY / 1_000_000.0)
    }
}

fn decay(elapsed: i64) -> f64 {
    (-(elapsed as f64) / MEMORY).exp()
}
