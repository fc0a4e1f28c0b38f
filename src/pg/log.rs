//! Messages for the server's log.

use pgrx::prelude::*;

pub fn info(message: &str) {
    ereport!(PgLogLevel::LOG, PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message.to_owned());
}

pub fn warning(message: &str) {
    ereport!(PgLogLevel::WARNING, PgSqlErrorCode::ERRCODE_WARNING, message.to_owned());
}

/// For the client of the session; the hint in full sentences.
pub fn notice(message: &str, hint: &str) {
    report(PgLogLevel::NOTICE, PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION, message, hint);
}

pub fn warning_with_hint(message: &str, hint: &str) {
    report(PgLogLevel::WARNING, PgSqlErrorCode::ERRCODE_WARNING, message, hint);
}

fn report(level: PgLogLevel, code: PgSqlErrorCode, message: &str, hint: &str) {
    pgrx::pg_sys::panic::ErrorReport::new(code, message.to_owned(), "awa")
        .set_hint(hint.to_owned())
        .report(level);
}
