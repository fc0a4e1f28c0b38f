#[pgrx::pg_schema]
mod tests {
    use pgrx::prelude::*;

    use crate::pg::datum::{Datum, ToDatum};
    use crate::pg::heap::{Fate, Table};
    use crate::pg::lock::LockMode;
    use crate::pg::snapshot::Snapshot;
    use crate::pg::xact;

    fn table() -> (Table, u32) {
        Spi::run(
            "CREATE TABLE plain (id bigint NOT NULL, word text); CREATE INDEX plain_id ON plain (id);
             CREATE INDEX plain_some ON plain (id) WHERE word IS NOT NULL",
        )
        .expect("a table");
        let oid = |name: &str| {
            Spi::get_one::<pg_sys::Oid>(&format!("SELECT '{name}'::regclass::oid"))
                .expect("an oid")
                .map_or(0, |oid| oid.to_u32())
        };
        (Table::open(oid("plain"), LockMode::RowExclusive), oid("plain_id"))
    }

    fn row(id: i64, word: Option<&str>) -> [Option<Datum>; 2] {
        [Some(id.to_datum()), word.map(|w| w.to_datum())]
    }

    #[pg_test]
    fn rows_are_found_by_their_index() {
        let (table, index) = table();
        for id in [5, 1, 3] {
            table.insert(&row(id, Some("one"))).expect("insert");
        }
        let many: Vec<_> = (10..1500).map(|id| row(id, None)).collect();
        let tids = table.insert_many(many.iter().map(|r| &r[..])).expect("insert many");
        assert_eq!(tids.len(), 1490);
        xact::command_counter_increment();
        let mut seen = Vec::new();
        table
            .index_range(index, 2, 12, Snapshot::SelfNow, |row| {
                seen.push((row.i64(1), row.text(2)));
                Ok(true)
            })
            .expect("range");
        let one = Some("one".to_owned());
        let expected = [(3, one.clone()), (5, one), (10, None), (11, None), (12, None)];
        assert!(seen.into_iter().eq(expected.map(|(id, word)| (Some(id), word))));
        // The server's own plans find them too: the partial index has its entries.
        Spi::run("SET LOCAL enable_seqscan = off").expect("set");
        let count =
            Spi::get_one::<i64>("SELECT count(*) FROM plain WHERE id < 9 AND word IS NOT NULL");
        assert_eq!(count, Ok(Some(3)));
    }

    #[pg_test]
    fn a_scan_of_everything_tells_what_became_of_the_writer() {
        let (table, _) = table();
        table.insert(&row(1, None)).expect("insert");
        let xid = xact::top_xid();
        let mut fates = Vec::new();
        table
            .scan(Snapshot::Any, |row| {
                fates.push((row.fate(), row.xmin(), row.is_deleted()));
                Ok(true)
            })
            .expect("scan");
        assert_eq!(fates, [(Fate::InProgress(xid), xid, false)]);
    }

    #[pg_test]
    fn a_null_where_there_is_none_is_refused() {
        let (table, _) = table();
        assert!(table.insert(&[None, None]).is_err());
        assert!(table.insert(&[Some(1_i64.to_datum())]).is_err());
    }
}
