//! Messages for the server's log.

use pgrx::prelude::*;

pub fn info(message: &str) {
    ereport!(PgLogLevel::LOG, PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message.to_owned());
}

pub fn warning(message: &str) {
    ereport!(PgLogLevel::WARNING, PgSqlErrorCode::ERRCODE_WARNING, message.to_owned());
}
