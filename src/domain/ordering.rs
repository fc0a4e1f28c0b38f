//! Which shard of a queue the jobs of an ordering key go to.

/// The shard. Other producers compute the same: FNV's prime and offset over the bytes, each
/// added after the multiplication.
pub fn shard(key: &[u8], shards: u8) -> u8 {
    let hash = key.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        hash.wrapping_mul(0x0000_0100_0000_01b3).wrapping_add(u64::from(*byte))
    });
    (hash % u64::from(shards.max(1))) as u8
}
