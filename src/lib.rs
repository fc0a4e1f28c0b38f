//! awa: the job queue that lives inside Postgres.
//!
//! The tables are the log, shared memory is the index, startup is replay.

pub mod domain;
mod error;
mod pg;

pgrx::pg_module_magic!(name, version);

pgrx::extension_sql_file!("../sql/install/10_schema.sql", name = "schema", bootstrap);
pgrx::extension_sql_file!("../sql/install/20_tables.sql", name = "tables", requires = ["schema"]);
