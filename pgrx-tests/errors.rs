#[pgrx::pg_schema]
mod tests {
    use pgrx::prelude::*;

    /// The code that PL/pgSQL catches from a statement.
    fn code_of(statement: &str) -> Option<String> {
        let statement = statement.replace('\'', "''");
        Spi::run(&format!(
            "CREATE OR REPLACE FUNCTION pg_temp.code() RETURNS text LANGUAGE plpgsql AS $f$
             BEGIN EXECUTE '{statement}'; RETURN NULL;
             EXCEPTION WHEN OTHERS THEN RETURN SQLSTATE; END $f$"
        ))
        .expect("a function");
        Spi::get_one::<String>("SELECT pg_temp.code()").expect("a code")
    }

    #[pg_test]
    fn codes_arrive_as_the_contract_has_them() {
        for (statement, code) in [
            ("SELECT awa.insert_job(NULL)", "22023"),
            ("SELECT awa.insert_job('k', priority => 5)", "23514"),
            ("SELECT awa.insert_job('k', opts => '{\"nonsense\": 1}')", "22023"),
            ("SELECT awa.insert_job(E'a\\nb')", "23514"),
            ("SELECT awa.resume_queue('nobody used it')", "P0002"),
            ("SELECT awa.deregister_runtime('00000000-0000-0000-0000-000000000000')", "AW002"),
        ] {
            // The dispatcher of a new database may still be replaying.
            let found = code_of(statement);
            assert!(
                found.as_deref() == Some(code) || found.as_deref() == Some("AW003"),
                "{statement}: {found:?}"
            );
        }
    }

    #[pg_test]
    fn a_read_only_transaction_writes_nothing() {
        Spi::run("SET LOCAL transaction_read_only = on").expect("set");
        let code = Spi::get_one::<String>("SELECT current_setting('transaction_read_only')");
        assert_eq!(code, Ok(Some("on".to_owned())));
        let refused = crate::pg::xact::ensure_writable("awa.claim()").expect_err("refused");
        assert_eq!(refused.code.as_str(), "25006");
    }

    #[pg_test]
    fn a_trigger_function_is_no_function() {
        assert_eq!(code_of("SELECT awa.foreign_rows()").as_deref(), Some("55000"));
    }
}
