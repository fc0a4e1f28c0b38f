#[pgrx::pg_schema]
mod tests {
    use pgrx::prelude::*;

    use crate::error::Error;
    use crate::pg::spi::{self, Arg};
    use crate::pg::xact;

    const WHO: &str = "SELECT current_user::pg_catalog.text, \
                       pg_catalog.current_setting('search_path')";

    fn who() -> (Option<String>, Option<String>) {
        spi::as_owner(|spi| {
            spi.query_one(WHO, &[], |row| Ok((row.text(1), row.text(2))))
                .map(Option::unwrap_or_default)
        })
        .expect("an answer")
    }

    #[pg_test]
    fn the_owner_is_a_role_for_a_while() {
        Spi::run("CREATE ROLE poor; SET LOCAL ROLE poor; SET LOCAL search_path = pg_temp, public")
            .expect("a role");
        let before = xact::user_id();
        let (user, path) = who();
        assert_ne!(user.as_deref(), Some("poor"));
        assert_eq!(path.as_deref(), Some("pg_catalog, pg_temp"));
        assert_eq!(xact::user_id(), before);
        let path = Spi::get_one::<String>("SELECT current_setting('search_path')");
        assert_eq!(path, Ok(Some("pg_temp, public".to_owned())));
    }

    #[pg_test]
    fn the_role_is_given_back_after_an_error_of_ours() {
        Spi::run("CREATE ROLE poor; SET LOCAL ROLE poor").expect("a role");
        let before = xact::user_id();
        let failed: crate::error::Result<()> = spi::as_owner(|_| Err(Error::invalid("no")));
        assert!(failed.is_err() && !spi::is_own());
        assert_eq!(xact::user_id(), before);
    }

    const SUM: &str = "SELECT $1 OPERATOR(pg_catalog.+) pg_catalog.cardinality($2)";

    #[pg_test]
    fn values_are_bound() {
        let sum = spi::as_owner(|spi| {
            let args = [Arg::of(40_i64), Arg::bigint_array(&[7, 8])];
            spi.query_one(SUM, &args, |row| Ok(row.i64(1)))
        });
        assert_eq!(sum.expect("a sum").flatten(), Some(42));
    }
}
