//! The directory of a sealed segment: which chunks it holds and which of their offsets have
//! a body. A start reads it instead of the bodies.

use super::bits::{Bits, CHUNK_SIZE};

/// The format of what follows.
const VERSION: u8 = 1;
const FULL: u8 = 1;
const PARTIAL: u8 = 0;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub number: i64,
    pub lane_id: i64,
    /// When the first of its jobs was enqueued, microseconds.
    pub born: i64,
    pub bodies: Bits,
}

/// 25 bytes for a full chunk, 153 for any other.
pub fn encode(chunks: impl IntoIterator<Item = Listed>) -> Vec<u8> {
    let mut bytes = vec![VERSION];
    for Listed { number, lane_id, born, bodies } in chunks {
        for part in [number, lane_id, born] {
            bytes.extend_from_slice(&part.to_le_bytes());
        }
        if usize::from(bodies.count()) == CHUNK_SIZE {
            bytes.push(FULL);
        } else {
            bytes.push(PARTIAL);
            bytes.extend_from_slice(&bodies.to_bytes());
        }
    }
    bytes
}

/// None for what `encode` did not write.
pub fn decode(bytes: &[u8]) -> Option<Vec<Listed>> {
    let (&VERSION, mut rest) = bytes.split_first()? else { return None };
    let mut chunks = Vec::new();
    while !rest.is_empty() {
        let mut parts = [0; 3];
        for part in &mut parts {
            let (bytes, behind) = rest.split_first_chunk::<8>()?;
            *part = i64::from_le_bytes(*bytes);
            rest = behind;
        }
        let (kind, behind) = rest.split_first()?;
        rest = behind;
        let mut bodies = Bits::default();
        match *kind {
            FULL => bodies.insert_range(0, CHUNK_SIZE as u16),
            PARTIAL => {
                let (bytes, behind) = rest.split_first_chunk()?;
                bodies = Bits::from_bytes(bytes);
                rest = behind;
            }
            _ => return None,
        }
        let [number, lane_id, born] = parts;
        chunks.push(Listed { number, lane_id, born, bodies });
    }
    Some(chunks)
}
