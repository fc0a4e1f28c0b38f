//! The 1,024 bits of a chunk.

pub const CHUNK_SIZE: usize = 1024;
const WORDS: usize = CHUNK_SIZE / 64;

#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bits([u64; WORDS]);

impl Default for Bits {
    fn default() -> Self {
        Self([0; WORDS])
    }
}

impl Bits {
    pub fn contains(&self, bit: u16) -> bool {
        self.0[usize::from(bit) / 64] & (1 << (bit % 64)) != 0
    }

    /// Sets a bit; true when it was clear.
    pub fn insert(&mut self, bit: u16) -> bool {
        let fresh = !self.contains(bit);
        self.0[usize::from(bit) / 64] |= 1 << (bit % 64);
        fresh
    }

    /// Clears a bit; true when it was set.
    pub fn remove(&mut self, bit: u16) -> bool {
        let held = self.contains(bit);
        self.0[usize::from(bit) / 64] &= !(1 << (bit % 64));
        held
    }

    pub fn insert_range(&mut self, first: u16, count: u16) {
        let (mut bit, end) = (usize::from(first), usize::from(first) + usize::from(count));
        while bit < end {
            let width = (64 - bit % 64).min(end - bit);
            let mask = if width == 64 { u64::MAX } else { ((1 << width) - 1) << (bit % 64) };
            self.0[bit / 64] |= mask;
            bit += width;
        }
    }

    pub fn insert_all(&mut self, other: &Self) {
        for (word, more) in self.0.iter_mut().zip(other.0) {
            *word |= more;
        }
    }

    pub fn first(&self) -> Option<u16> {
        let word = self.0.iter().position(|w| *w != 0)?;
        Some((word * 64) as u16 + self.0[word].trailing_zeros() as u16)
    }

    pub fn pop_first(&mut self) -> Option<u16> {
        let word = self.0.iter().position(|w| *w != 0)?;
        let bit = self.0[word].trailing_zeros() as u16;
        self.0[word] &= self.0[word] - 1;
        Some((word * 64) as u16 + bit)
    }

    pub fn count(&self) -> u16 {
        self.0.iter().map(|w| w.count_ones() as u16).sum()
    }

    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|w| *w == 0)
    }

    pub fn iter(&self) -> impl Iterator<Item = u16> + use<> {
        let mut rest = *self;
        core::iter::from_fn(move || rest.pop_first())
    }
}

/// The bytes of a chunk's bits.
pub const BIT_BYTES: usize = CHUNK_SIZE / 8;

impl Bits {
    /// Bit i is bit i % 8, from the low end, of byte i / 8.
    pub fn to_bytes(self) -> [u8; BIT_BYTES] {
        let mut bytes = [0; BIT_BYTES];
        for (place, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    pub fn from_bytes(bytes: &[u8; BIT_BYTES]) -> Self {
        let mut bits = Self::default();
        for (word, place) in bits.0.iter_mut().zip(bytes.chunks_exact(8)) {
            let mut le = [0; 8];
            le.copy_from_slice(place);
            *word = u64::from_le_bytes(le);
        }
        bits
    }
}
