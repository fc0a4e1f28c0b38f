//! Names of queues and kinds.

/// Characters, not bytes.
pub const MAX_CHARS: usize = 200;
/// What 200 characters can take in UTF-8.
pub const MAX_BYTES: usize = MAX_CHARS * 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BadName {
    Empty,
    TooLong,
    ControlCharacter,
}

/// 64 bits of FNV-1a: so wide that two names in use have one hash as good as never.
pub fn hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// 1 to 200 characters, none of them control characters.
pub fn check(name: &str) -> Result<(), BadName> {
    if name.is_empty() {
        return Err(BadName::Empty);
    }
    // The byte length bounds the character count, so a huge text is not walked.
    if name.len() > MAX_BYTES || name.chars().count() > MAX_CHARS {
        return Err(BadName::TooLong);
    }
    if name.chars().any(char::is_control) {
        return Err(BadName::ControlCharacter);
    }
    Ok(())
}
