//! Ordering keys: which shard of a queue their jobs go to, and how memory names them.

use super::table::mix;

/// The shard. Other producers compute the same: FNV's prime and offset over the bytes, each
/// added after the multiplication.
pub fn shard(key: &[u8], shards: u8) -> u8 {
    let hash = key.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        hash.wrapping_mul(0x0000_0100_0000_01b3).wrapping_add(u64::from(*byte))
    });
    (hash % u64::from(shards.max(1))) as u8
}

/// What memory knows of an ordering key; 0 is for jobs without one.
pub fn hash(key: &[u8]) -> u64 {
    let start = 0xcbf2_9ce4_8422_2325_u64 ^ key.len() as u64;
    mix(key.iter().fold(start, |hash, byte| mix(hash ^ u64::from(*byte)))).max(1)
}
