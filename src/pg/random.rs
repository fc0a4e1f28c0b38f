//! Randomness for jitter and ids.

/// In [0, 1), from the clock-seeded hasher keys of the standard library: spreads retries, and
/// is no secret.
pub fn fraction() -> f64 {
    use std::hash::{BuildHasher, Hasher};
    let bits = std::collections::hash_map::RandomState::new().build_hasher().finish();
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}
