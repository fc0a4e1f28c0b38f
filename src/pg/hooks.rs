//! The server's hooks, turned into calls of `supervisor::ddl`.
//!
//! The hook functions own nothing that would have to be dropped and call the previous
//! hook plainly: an ERROR of a statement jumps over them as it would over C, with its
//! context, position and constraint name intact. Guarding that call as well would
//! turn every error of COPY or ALTER TABLE into one of ours.

use core::ffi::{CStr, c_char, c_int, c_void};

use pgrx::pg_sys;

use super::{boundary, database};
use crate::error::Result;
use crate::supervisor::ddl::{self, ObjectEvent, Statement};

static mut PREVIOUS_ACCESS: pg_sys::object_access_hook_type = None;
static mut PREVIOUS_UTILITY: pg_sys::ProcessUtility_hook_type = None;

mod raw {
    use super::*;

    unsafe extern "C-unwind" {
        pub fn standard_ProcessUtility(
            pstmt: *mut pg_sys::PlannedStmt,
            query: *const c_char,
            read_only_tree: bool,
            context: pg_sys::ProcessUtilityContext::Type,
            params: pg_sys::ParamListInfo,
            environment: *mut pg_sys::QueryEnvironment,
            destination: *mut pg_sys::DestReceiver,
            completion: *mut pg_sys::QueryCompletion,
        );
    }
}

/// For `_PG_init`, while preloading.
pub fn install() {
    // SAFETY: once, in the postmaster; every process inherits the lists.
    unsafe {
        PREVIOUS_ACCESS = pg_sys::object_access_hook;
        pg_sys::object_access_hook = Some(on_object_access);
        PREVIOUS_UTILITY = pg_sys::ProcessUtility_hook;
        pg_sys::ProcessUtility_hook = Some(on_utility);
        pg_sys::RegisterXactCallback(Some(on_transaction), core::ptr::null_mut());
    }
}

unsafe extern "C-unwind" fn on_object_access(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
    column: c_int,
    arg: *mut c_void,
) {
    // SAFETY: the arguments are handed on as they came; nothing here is dropped.
    unsafe {
        if let Some(previous) = PREVIOUS_ACCESS {
            previous(access, class, object, column, arg);
        }
        if let Some(event) = object_event(access, class, object) {
            boundary::run(|| ddl::on_object(event));
        }
    }
}

fn object_event(
    access: pg_sys::ObjectAccessType::Type,
    class: pg_sys::Oid,
    object: pg_sys::Oid,
) -> Option<ObjectEvent> {
    use pg_sys::ObjectAccessType::{OAT_DROP, OAT_POST_ALTER, OAT_POST_CREATE};

    let is_extension = class == pg_sys::ExtensionRelationId;
    if !is_extension && class != pg_sys::DatabaseRelationId {
        return None;
    }
    match access {
        OAT_POST_CREATE if is_extension => Some(ObjectEvent::ExtensionMade),
        OAT_DROP if is_extension => Some(ObjectEvent::ExtensionDropped(object.to_u32())),
        OAT_DROP => Some(ObjectEvent::DatabaseDropped(object.to_u32())),
        OAT_POST_CREATE | OAT_POST_ALTER if !is_extension => Some(ObjectEvent::DatabaseChanged),
        _ => None,
    }
}

unsafe extern "C-unwind" fn on_utility(
    pstmt: *mut pg_sys::PlannedStmt,
    query: *const c_char,
    read_only_tree: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    params: pg_sys::ParamListInfo,
    environment: *mut pg_sys::QueryEnvironment,
    destination: *mut pg_sys::DestReceiver,
    completion: *mut pg_sys::QueryCompletion,
) {
    // SAFETY: the arguments are handed on as they came; nothing here is dropped. The
    // parse tree is not looked at after the statement.
    unsafe {
        let node = (*pstmt).utilityStmt;
        // Looked at now: the statement may end its transaction, and its parse tree with it
        // (see pgss_ProcessUtility, pg_stat_statements.c).
        let resolved = resolved(node);
        if concerns_us(node) {
            boundary::run(|| match statement(node)? {
                Some(statement) => ddl::before(statement),
                None => Ok(()),
            });
        }
        match PREVIOUS_UTILITY {
            Some(previous) => previous(
                pstmt,
                query,
                read_only_tree,
                context,
                params,
                environment,
                destination,
                completion,
            ),
            None => raw::standard_ProcessUtility(
                pstmt,
                query,
                read_only_tree,
                context,
                params,
                environment,
                destination,
                completion,
            ),
        }
        if let Some(committed) = resolved {
            boundary::run(|| {
                ddl::after_commit_prepared(committed);
                Ok(())
            });
        }
    }
}

/// A cheap look at the kind of statement.
///
/// # Safety
/// `node` is a parse tree.
unsafe fn concerns_us(node: *mut pg_sys::Node) -> bool {
    use pg_sys::NodeTag::{T_AlterDatabaseStmt, T_CreatedbStmt, T_DropStmt, T_RenameStmt};

    // SAFETY: every node starts with its tag.
    !node.is_null()
        && matches!(
            unsafe { (*node).type_ },
            T_AlterDatabaseStmt | T_CreatedbStmt | T_DropStmt | T_RenameStmt
        )
}

/// The statement, if it needs a database, or an extension, without its worker, and if
/// the role may give it: others must not be able to disturb the worker.
///
/// # Safety
/// `node` is a parse tree.
unsafe fn statement(node: *mut pg_sys::Node) -> Result<Option<Statement>> {
    use pg_sys::NodeTag::{T_AlterDatabaseStmt, T_CreatedbStmt, T_DropStmt, T_RenameStmt};

    // SAFETY: the tag tells the type of the node and of what it points to.
    unsafe {
        Ok(match (*node).type_ {
            T_CreatedbStmt => {
                let stmt: *mut pg_sys::CreatedbStmt = node.cast();
                // Without an argument it says TEMPLATE = DEFAULT.
                let template = option((*stmt).options, c"template")
                    .filter(|&element| !(*element).arg.is_null())
                    .map_or(c"template1".as_ptr(), |element| pg_sys::defGetString(element));
                owned(template)
                    .filter(|_| database::may_create_database())
                    .map(Statement::CopyDatabase)
            }
            T_AlterDatabaseStmt => {
                let stmt: *mut pg_sys::AlterDatabaseStmt = node.cast();
                option((*stmt).options, c"tablespace")
                    .and_then(|_| owned((*stmt).dbname))
                    .map(Statement::MoveDatabase)
            }
            T_RenameStmt => {
                let stmt: *mut pg_sys::RenameStmt = node.cast();
                if (*stmt).renameType == pg_sys::ObjectType::OBJECT_DATABASE {
                    owned((*stmt).subname).map(Statement::MoveDatabase)
                } else {
                    None
                }
            }
            T_DropStmt => {
                let stmt: *mut pg_sys::DropStmt = node.cast();
                if (*stmt).removeType == pg_sys::ObjectType::OBJECT_EXTENSION
                    && names_us((*stmt).objects)
                {
                    database::extension()
                        .filter(|&extension| database::owns_extension(extension))
                        .map(|_| Statement::DropExtension)
                } else {
                    None
                }
            }
            _ => None,
        })
    }
}

/// # Safety
/// `name` is a C string.
unsafe fn owned(name: *const c_char) -> Option<u32> {
    // SAFETY: the caller vouches for the name.
    let database = unsafe { database::database_named(name) }?;
    database::owns_database(database).then_some(database)
}

/// # Safety
/// `options` is a list of DefElem.
unsafe fn option(options: *mut pg_sys::List, name: &CStr) -> Option<*mut pg_sys::DefElem> {
    // SAFETY: as the caller vouches.
    unsafe {
        elements(options)
            .map(|cell| cell.cast::<pg_sys::DefElem>())
            .find(|&element| CStr::from_ptr((*element).defname) == name)
    }
}

/// Whether the names of a DROP EXTENSION, a list of String nodes, have ours.
///
/// # Safety
/// See above.
unsafe fn names_us(names: *mut pg_sys::List) -> bool {
    // SAFETY: as the caller vouches.
    unsafe {
        elements(names).any(|cell| CStr::from_ptr((*cell.cast::<pg_sys::String>()).sval) == c"awa")
    }
}

/// # Safety
/// `list` is NIL or a list of pointers that lives as long as the iterator.
unsafe fn elements(list: *mut pg_sys::List) -> impl Iterator<Item = *mut c_void> {
    // SAFETY: `length` cells lie at `elements`.
    unsafe {
        let length = if list.is_null() { 0 } else { usize::try_from((*list).length).unwrap_or(0) };
        (0..length).map(move |i| (*(*list).elements.add(i)).ptr_value)
    }
}

/// The outcome of a prepared transaction, if that is what the statement decides.
///
/// # Safety
/// `node` is a parse tree.
unsafe fn resolved(node: *mut pg_sys::Node) -> Option<bool> {
    use pg_sys::TransactionStmtKind::{TRANS_STMT_COMMIT_PREPARED, TRANS_STMT_ROLLBACK_PREPARED};

    // SAFETY: the tag tells the type.
    unsafe {
        if node.is_null() || (*node).type_ != pg_sys::NodeTag::T_TransactionStmt {
            return None;
        }
        let stmt: *mut pg_sys::TransactionStmt = node.cast();
        match (*stmt).kind {
            TRANS_STMT_COMMIT_PREPARED => Some(true),
            TRANS_STMT_ROLLBACK_PREPARED => Some(false),
            _ => None,
        }
    }
}

unsafe extern "C-unwind" fn on_transaction(event: pg_sys::XactEvent::Type, _arg: *mut c_void) {
    use pg_sys::XactEvent::{
        XACT_EVENT_ABORT, XACT_EVENT_COMMIT, XACT_EVENT_PRE_COMMIT, XACT_EVENT_PRE_PREPARE,
        XACT_EVENT_PREPARE,
    };

    if !ddl::is_pending() {
        return;
    }
    match event {
        // SAFETY: called by the server; nothing here is dropped.
        XACT_EVENT_PRE_COMMIT | XACT_EVENT_PRE_PREPARE => unsafe {
            boundary::run(|| {
                ddl::before_commit();
                Ok(())
            });
        },
        // From here on nothing may fail: an ERROR now would be a PANIC of the server
        // or start the abort again.
        XACT_EVENT_COMMIT => quietly(ddl::committed),
        XACT_EVENT_PREPARE => quietly(ddl::prepared),
        XACT_EVENT_ABORT => quietly(ddl::aborted),
        _ => {}
    }
}

fn quietly(act: fn()) {
    // What it threw cannot be reported from here; the launcher's sweep makes up for
    // a wake-up that got lost.
    let _ = boundary::swallow(act);
}
