//! The one error type of the extension.
//!
//! `api` returns it, `pg::call` raises it with its SQLSTATE intact: the codes are
//! the contract, so they must not pass through a framework that knows only the
//! standard ones.

use std::borrow::Cow;
use std::fmt;

pub type Result<T> = core::result::Result<T, Error>;

/// Five characters, as in `errcodes.txt`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct SqlState(pub [u8; 5]);

impl SqlState {
    /// The receipt no longer owns its job.
    pub const STALE_RECEIPT: Self = Self(*b"AW001");
    /// The runtime is unknown or was declared dead.
    pub const RUNTIME_GONE: Self = Self(*b"AW002");
    /// Memory is still being rebuilt from the tables.
    pub const REPLAYING: Self = Self(*b"AW003");
    /// A fixed capacity is used up.
    pub const CAPACITY: Self = Self(*b"AW004");
    pub const FEATURE_NOT_SUPPORTED: Self = Self(*b"0A000");
    pub const INVALID_PARAMETER: Self = Self(*b"22023");
    pub const CHECK_VIOLATION: Self = Self(*b"23514");
    pub const UNIQUE_VIOLATION: Self = Self(*b"23505");
    pub const ACTIVE_TRANSACTION: Self = Self(*b"25001");
    pub const READ_ONLY_TRANSACTION: Self = Self(*b"25006");
    pub const INSUFFICIENT_PRIVILEGE: Self = Self(*b"42501");
    pub const LOCK_NOT_AVAILABLE: Self = Self(*b"55P03");
    pub const NOT_NULL_VIOLATION: Self = Self(*b"23502");
    pub const UNDEFINED_OBJECT: Self = Self(*b"42704");
    pub const WRONG_STATE: Self = Self(*b"55000");
    pub const NOT_FOUND: Self = Self(*b"P0002");
    pub const INTERNAL: Self = Self(*b"XX000");

    pub fn as_str(&self) -> &str {
        core::str::from_utf8(&self.0).unwrap_or("XX000")
    }
}

impl fmt::Debug for SqlState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[derive(Debug, Clone)]
pub struct Error {
    pub code: SqlState,
    /// Lower case, no full stop (the server's message style).
    pub message: Cow<'static, str>,
    /// Full sentences.
    pub detail: Option<Cow<'static, str>>,
    /// What the user can do, in full sentences.
    pub hint: Option<Cow<'static, str>>,
    pub constraint: Option<&'static str>,
}

impl Error {
    pub fn new(code: SqlState, message: impl Into<Cow<'static, str>>) -> Self {
        Self { code, message: message.into(), detail: None, hint: None, constraint: None }
    }

    pub fn detail(mut self, detail: impl Into<Cow<'static, str>>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    pub fn hint(mut self, hint: impl Into<Cow<'static, str>>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub fn constraint(mut self, name: &'static str) -> Self {
        self.constraint = Some(name);
        self
    }

    /// 22023.
    pub fn invalid(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(SqlState::INVALID_PARAMETER, message)
    }

    /// XX000: a broken promise of our own.
    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(SqlState::INTERNAL, message)
            .hint("Call awa.check() and awa.rebuild(), and report this.")
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}
