//! The access lists of queues.

use super::claim_index;
use crate::error::{Error, Result, SqlState};
use crate::pg::heap::Table;
use crate::pg::lock::LockMode;
use crate::pg::snapshot::Snapshot;
use crate::pg::spi::{self, Arg};
use crate::pg::{catalog, lock, role, xact};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    Producer,
    Worker,
    Operator,
    Reader,
}

impl Profile {
    pub fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "producer" => Self::Producer,
            "worker" => Self::Worker,
            "operator" => Self::Operator,
            "reader" => Self::Reader,
            _ => return None,
        })
    }

    fn name(self) -> &'static str {
        match self {
            Self::Producer => "producer",
            Self::Worker => "worker",
            Self::Operator => "operator",
            Self::Reader => "reader",
        }
    }

    /// The routines that a role with the profile may execute.
    fn may_call(self, routine: &str) -> bool {
        match self {
            Self::Producer => PRODUCE.contains(&routine),
            Self::Worker => WORK.contains(&routine),
            Self::Reader => READ.contains(&routine),
            Self::Operator => !RESERVED.contains(&routine),
        }
    }

    /// What a role with the profile may do with a view. To write to one is to call a function,
    /// which has the last word; a producer has SELECT where a client looks or RETURNING asks,
    /// not the functions by which these views read.
    fn may_use(self, view: &str) -> Option<&'static str> {
        match (self, view) {
            (Self::Producer, "jobs") => Some("INSERT, SELECT"),
            (Self::Producer, "schema_version" | "queue_state_counts") => Some("SELECT"),
            (Self::Operator, "jobs") => Some("SELECT, INSERT, UPDATE, DELETE"),
            (Self::Operator, "queue_meta") => Some("SELECT, INSERT, UPDATE"),
            (Self::Reader | Self::Operator, _) => Some("SELECT"),
            _ => None,
        }
    }

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

const PRODUCE: &[&str] = &[
    "insert_job",
    "insert_jobs",
    "insert_jobs_compat_batch",
    "insert_job_compat",
    "get_result",
    "refresh_admin_metadata",
];

const WORK: &[&str] = &[
    "register_runtime",
    "heartbeat",
    "deregister_runtime",
    "claim",
    "claim_from",
    "wait_for_jobs",
    "claim_outcome",
    "complete",
    "complete_many",
    "complete_and_claim",
    "fail",
    "snooze",
    "release",
    "cancel_attempt",
    "cancel_requested",
    "extend",
    "set_progress",
    "register_callback",
    "wait_for_callback",
    "complete_external",
    "fail_external",
    "retry_external",
    "resume_external",
    "heartbeat_callback",
    "cancel_callback",
    "callback_result",
    "recover",
    "upsert_queue_descriptor",
    "upsert_job_kind_descriptor",
];

/// Views call functions as who reads them.
const READ: &[&str] = &[
    "jobs_rows",
    "terminal_rows",
    "queue_stats_rows",
    "dlq_rows",
    "descriptor_rows",
    "metrics_rows",
    "runtime_state",
    "get_job",
    "list_jobs",
    "dump_job",
    "job_attempts",
    "get_result",
    "may_read",
    "next_fires",
    "recompute_dirty_admin_metadata",
    "refresh_admin_metadata",
    "runtime_control_status",
    "storage_status",
    "preview_batch_operation",
];

/// For the owner and superusers; but for the first four, triggers and the install script call
/// them. `ensure_claim_batch_job_index` follows a table privilege, which no profile has.
const RESERVED: &[&str] = &[
    "grant_access",
    "revoke_access",
    "rebuild",
    "ensure_claim_batch_job_index",
    "foreign_rows",
    "replace_segment",
    "write_jobs_view",
    "write_queue_meta",
    "show_pause",
    "mark_dirty_keys_insert",
    "mark_dirty_keys_update",
    "mark_dirty_keys_delete",
    "require_preload",
];

fn covers(pattern: &str, queue: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => queue.starts_with(prefix),
        None => pattern == queue,
    }
}

/// Whether the current user, or a role whose privileges it has, has one of the profiles.
pub fn has_any(profiles: &[Profile]) -> Result<bool> {
    let user = xact::user_id();
    let mut found = false;
    let table = Table::open(catalog::relation("queue_acl")?, LockMode::AccessShare);
    table.scan(Snapshot::SelfNow, |row| {
        let named = row.text(2).is_some_and(|name| profiles.iter().any(|p| p.is_named(&name)));
        found = named && role::has_privileges_of(user, row.oid(1).unwrap_or(0));
        Ok(!found)
    })?;
    table.close_release_lock();
    Ok(found)
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

const ROUTINES: &str = "
SELECT proname::pg_catalog.text, oid::pg_catalog.regprocedure::pg_catalog.text
FROM pg_catalog.pg_proc
WHERE pronamespace OPERATOR(pg_catalog.=) 'awa'::pg_catalog.regnamespace
ORDER BY 1";

const VIEWS: &str = "
SELECT relname::pg_catalog.text, oid::pg_catalog.regclass::pg_catalog.text
FROM pg_catalog.pg_class
WHERE relnamespace OPERATOR(pg_catalog.=) 'awa'::pg_catalog.regnamespace
  AND relkind OPERATOR(pg_catalog.=) 'v'
ORDER BY 1";

/// Roles that were dropped have no place in the list: their oids may come again.
const SWEEP: &str = "
DELETE FROM awa.queue_acl AS a WHERE NOT EXISTS (
    SELECT FROM pg_catalog.pg_roles AS r
    WHERE r.oid OPERATOR(pg_catalog.=) a.role::pg_catalog.oid)";

const INSERT: &str = "
INSERT INTO awa.queue_acl (role, profile, queue)
SELECT $1::pg_catalog.oid::pg_catalog.regrole, $2, pattern FROM pg_catalog.unnest($3) AS pattern
ON CONFLICT DO NOTHING";

const DELETE: &str = "DELETE FROM awa.queue_acl WHERE role::pg_catalog.oid OPERATOR(pg_catalog.=) $1::pg_catalog.oid";

fn find_role(name: &str) -> Result<(u32, String)> {
    role::find(name).and_then(|oid| Some((oid, role::quoted(oid)?))).ok_or_else(|| {
        Error::new(SqlState::UNDEFINED_OBJECT, format!("role \"{name}\" does not exist"))
    })
}

/// One grant at a time: two that write the access list of one object fail with "tuple
/// concurrently updated" (simple_heap_update, heapam.c).
pub fn serialize() -> Result<()> {
    lock::hold_key(catalog::relation("queue_acl")?, 0);
    Ok(())
}

/// The same, where that needs no wait.
pub fn try_serialize() -> Result<bool> {
    Ok(lock::try_hold_key(catalog::relation("queue_acl")?, 0))
}

/// Lets the role call what its profile needs, on queues that the patterns name.
pub fn grant(role: &str, profile: Profile, patterns: &[String]) -> Result<()> {
    let (oid, quoted) = find_role(role)?;
    serialize()?;
    spi::as_owner(|spi| {
        spi.execute(SWEEP, &[])?;
        let args = [Arg::of(i64::from(oid)), Arg::of(profile.name()), Arg::text_array(patterns)];
        spi.execute(INSERT, &args)?;
        let routines = spi.query(ROUTINES, &[])?.collect(|row| {
            let name = row.text(1).unwrap_or_default();
            Ok(profile.may_call(&name).then(|| row.text(2).unwrap_or_default()))
        })?;
        let routines: Vec<String> = routines.into_iter().flatten().collect();
        spi.command(&format!("GRANT USAGE ON SCHEMA awa TO {quoted}"))?;
        // Who makes a table with a column of the type needs it: clients stage jobs in one.
        spi.command(&format!("GRANT USAGE ON TYPE awa.job_state TO {quoted}"))?;
        spi.command(&format!("GRANT EXECUTE ON ROUTINE {} TO {quoted}", routines.join(", ")))?;
        let views = spi.query(VIEWS, &[])?.collect(|row| {
            let name = row.text(1).unwrap_or_default();
            Ok(profile.may_use(&name).map(|acts| (acts, row.text(2).unwrap_or_default())))
        })?;
        for (acts, view) in views.into_iter().flatten() {
            spi.command(&format!("GRANT {acts} ON {view} TO {quoted}"))?;
        }
        Ok(())
    })?;
    claim_index::refresh_execute().map(|_| ())
}

/// Leaves the role nothing in the schema, unless it owns it: its functions run as the owner.
pub fn revoke(role: &str) -> Result<()> {
    let (oid, quoted) = find_role(role)?;
    let owns = oid == catalog::extension_owner()?;
    serialize()?;
    spi::as_owner(|spi| {
        spi.execute(DELETE, &[Arg::of(i64::from(oid))])?;
        if owns {
            return Ok(());
        }
        for objects in [
            "ALL ROUTINES IN SCHEMA awa",
            "ALL TABLES IN SCHEMA awa",
            "TYPE awa.job_state",
            "SCHEMA awa",
        ] {
            spi.command(&format!("REVOKE ALL ON {objects} FROM {quoted}"))?;
        }
        Ok(())
    })?;
    claim_index::refresh_execute().map(|_| ())
}
