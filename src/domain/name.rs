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
