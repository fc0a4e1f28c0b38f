//! awa: the job queue that lives inside Postgres.
//!
//! The tables are the log, shared memory is the index, startup is replay.

pub mod domain;
pub mod error;
pub mod pg;

pgrx::pg_module_magic!(name, version);

#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    pg::boundary::note_panics();
    if pg::shmem::is_preloading() {
        pg::shmem::request(1 << 13, 8);
    }
}

pgrx::extension_sql_file!("../sql/install/10_schema.sql", name = "schema", bootstrap);
pgrx::extension_sql_file!("../sql/install/20_tables.sql", name = "tables", requires = ["schema"]);
