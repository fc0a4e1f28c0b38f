//! Who may do what on which queue.
//!
//! EXECUTE on a function is the first gate; the list of queues in `queue_acl` is the
//! second. Functions are SECURITY INVOKER so that the caller is known here.

use crate::error::{Error, Result, SqlState};
use crate::pg::{catalog, xact};
use crate::store::acl::{self, Profile};

/// 42501 unless the current user may act on the queue in this way. No queue has an empty
/// name: it stands for the database, and only a list of every queue covers it. Superusers and the
/// extension's owner may do everything.
pub fn check(queue: &str, profile: Profile) -> Result<()> {
    if may(queue, profile)? {
        return Ok(());
    }
    if queue.is_empty() {
        let error = Error::new(
            SqlState::INSUFFICIENT_PRIVILEGE,
            "permission denied for the queues of this database",
        );
        return Err(error.hint("This takes awa.grant_access() on every queue."));
    }
    Err(Error::new(
        SqlState::INSUFFICIENT_PRIVILEGE,
        format!("permission denied for queue \"{queue}\""),
    )
    .hint("Ask for awa.grant_access() on this queue."))
}

pub fn check_all(queues: &[String], profile: Profile) -> Result<()> {
    queues.iter().try_for_each(|queue| check(queue, profile))
}

pub fn may(queue: &str, profile: Profile) -> Result<bool> {
    Ok(is_master()? || acl::allows(queue, profile)?)
}

/// 42501 unless the current user has one of the profiles, on whatever queues.
pub fn check_any(profiles: &[Profile]) -> Result<()> {
    if is_master()? || acl::has_any(profiles)? {
        return Ok(());
    }
    Err(Error::new(SqlState::INSUFFICIENT_PRIVILEGE, "permission denied for schema \"awa\"")
        .hint("Ask for awa.grant_access()."))
}

/// Whether the current user is bound by no list.
pub fn is_master() -> Result<bool> {
    let user = xact::user_id();
    Ok(xact::is_superuser(user) || user == catalog::extension_owner()?)
}
