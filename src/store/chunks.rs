//! Chunk numbers.

use crate::error::Result;
use crate::pg::{catalog, sequence};

/// Numbers in one value of the sequence: one WAL record of it serves 32 million jobs.
const BLOCK: i64 = 1024;

/// Chunk numbers nobody used, in this or any earlier life of the database: the first, and
/// how many.
pub fn next_block() -> Result<(i64, i64)> {
    let value = sequence::next_value(catalog::relation("chunk_blocks")?);
    Ok((value * BLOCK, BLOCK))
}
