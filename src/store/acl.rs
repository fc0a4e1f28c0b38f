//! The access lists of queues.

use crate::error::Result;
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::{catalog, role, xact};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    Producer,
    Worker,
    Operator,
    Reader,
}

impl Profile {
    fn is_named(self, name: &str) -> bool {
        // An operator may do everything that the others may.
        name == "operator"
            || match self {
                Self::Producer => name == "producer",
                Self::Worker => name == "worker",
                Self::Reader => name == "reader",
                Self::Operator => false,
            }
    }
}

fn covers(pattern: &str, queue: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => queue.starts_with(prefix),
        None => pattern == queue,
    }
}

/// Whether a list entry of the current user, or of a role whose privileges it has, covers
/// the act.
pub fn allows(queue: &str, profile: Profile) -> Result<bool> {
    let user = xact::user_id();
    let mut allowed = false;
    let table = Table::open(catalog::relation("queue_acl")?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        let role = row.oid(1).unwrap_or(0);
        let named = row.text(2).is_some_and(|name| profile.is_named(&name));
        let covered = row.text(3).is_some_and(|pattern| covers(&pattern, queue));
        allowed = named && covered && role::has_privileges_of(user, role);
        Ok(!allowed)
    })?;
    table.close_release_lock();
    Ok(allowed)
}
