//! grant_access, revoke_access.

use super::access;
use super::args::{check_name, required};
use crate::error::{Error, Result, SqlState};
use crate::pg::call::{Call, Returned, sql_function};
use crate::pg::xact;
use crate::store::acl::{self, Profile};

sql_function!(awa_grant_access, grant);
sql_function!(awa_revoke_access, revoke);

/// Gives a role a profile, on some queues or on all. Grants add up.
///
/// Arguments: role_name, profile (producer, worker, operator, reader), queues (names, or
/// prefixes that end in `*`; NULL: all). Errors: 42501 unless the caller is a superuser or the
/// extension's owner, 42704 for an unknown role, 22023 for an unknown profile.
fn grant(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.grant_access()")?;
    ensure_master("awa.grant_access")?;
    let role = required(call.name(0), "role_name")?;
    let profile = required(call.text(1), "profile")?;
    let profile = Profile::parse(&profile).ok_or_else(|| {
        Error::invalid(format!("unknown profile \"{profile}\""))
            .hint("The profiles are producer, worker, operator and reader.")
    })?;
    let queues = match call.text_array(2)? {
        None => vec!["*".to_owned()],
        Some(given) => given
            .into_iter()
            .map(|pattern| {
                let pattern = required(pattern, "queue")?;
                check_name(&pattern, "queue name or prefix")?;
                Ok(pattern)
            })
            .collect::<Result<Vec<String>>>()?,
    };
    acl::grant(&role, profile, &queues)?;
    Ok(Returned::Void)
}

/// Takes all profiles from a role, and every privilege in the schema.
///
/// Argument: role_name. Errors: as grant_access.
fn revoke(call: &mut Call) -> Result<Returned> {
    xact::ensure_writable("awa.revoke_access()")?;
    ensure_master("awa.revoke_access")?;
    let role = required(call.name(0), "role_name")?;
    acl::revoke(&role)?;
    Ok(Returned::Void)
}

fn ensure_master(function: &str) -> Result<()> {
    if access::is_master()? {
        return Ok(());
    }
    Err(Error::new(
        SqlState::INSUFFICIENT_PRIVILEGE,
        format!("permission denied for function {function}"),
    )
    .detail("Only the owner of the extension and superusers may call it."))
}
