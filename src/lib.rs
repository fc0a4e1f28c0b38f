//! awa: the job queue that lives inside Postgres.
//!
//! The tables are the log, shared memory is the index, startup is replay.

pub mod api;
pub mod dispatch;
pub mod domain;
pub mod error;
pub mod maintenance;
pub mod pg;
pub mod store;
pub mod supervisor;

pgrx::pg_module_magic!(name, version);

#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    pg::boundary::note_panics();
    if !pg::shmem::is_preloading() {
        // Loaded by a session alone: no shared memory, so every function says why
        // it cannot work (see pg::shmem::ensure_ready).
        return;
    }
    pg::guc::define();
    if pg::is_binary_upgrade() {
        return;
    }
    let registry = pg::registry::size();
    let dispatcher = dispatch::plan(dispatch::capacities(), registry);
    pg::shmem::attach(dispatch::format);
    pg::shmem::request(registry + dispatcher, dispatch::LOCK + 1);
    supervisor::set_callbacks(dispatch::callbacks());
    pg::hooks::install();
    pg::worker::register_launcher();
}

pgrx::extension_sql_file!("../sql/install/10_schema.sql", name = "schema", bootstrap);
pgrx::extension_sql_file!("../sql/install/20_tables.sql", name = "tables", requires = ["schema"]);
pgrx::extension_sql_file!(
    "../sql/install/30_functions.sql",
    name = "functions",
    requires = ["tables"]
);
pgrx::extension_sql_file!(
    "../sql/install/40_clients.sql",
    name = "clients",
    requires = ["functions"]
);
pgrx::extension_sql_file!("../sql/install/90_access.sql", name = "access", finalize);

#[cfg(feature = "pg_test")]
#[path = "../pgrx-tests/mod.rs"]
mod pg_tests;

/// So that `cargo pgrx test` can run them too.
#[cfg(all(test, feature = "pg_test"))]
pub mod pg_test {
    pub fn setup(_options: Vec<&str>) {}

    pub fn postgresql_conf_options() -> Vec<&'static str> {
        vec!["shared_preload_libraries = 'awa'"]
    }
}
