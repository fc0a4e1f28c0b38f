//! Pure decisions and data structures: no Postgres, no unsafe, no clock.

#![forbid(unsafe_code)]

pub mod ageing;
pub mod backoff;
pub mod bits;
pub mod clock;
pub mod directory;
pub mod dispatcher;
pub mod entities;
pub mod name;
pub mod ordering;
pub mod page;
pub mod rate;
pub mod receipt;
pub mod rescue;
pub mod segments;
pub mod table;
pub mod undo;
pub mod unique;
pub mod wheel;
