#[pgrx::pg_schema]
mod tests {
    use pgrx::prelude::*;

    use crate::pg::catalog::{self, Leaf, LeafIndex};

    fn oid(name: &str) -> u32 {
        Spi::get_one::<pg_sys::Oid>(&format!("SELECT '{name}'::regclass::oid"))
            .expect("an oid")
            .map_or(0, |oid| oid.to_u32())
    }

    #[pg_test]
    fn every_leaf_is_known_by_number() {
        for segment in 0..16 {
            for (leaf, name) in [
                (Leaf::Ready, "ready_entries"),
                (Leaf::Claims, "lease_claim_batches"),
                (Leaf::Closures, "lease_claim_closures"),
            ] {
                let found = catalog::leaf(leaf, segment).expect("a leaf");
                assert_eq!(found, oid(&format!("awa.{name}_{segment}")));
            }
            let found = catalog::leaf_index(LeafIndex::Position, segment).expect("an index");
            assert_eq!(found, oid(&format!("awa.ready_entries_{segment}_position")));
        }
        assert!(catalog::leaf(Leaf::Ready, 16).is_err());
        assert!(catalog::relation("no such table").is_err());
    }

    #[pg_test]
    fn labels_of_job_states_go_both_ways() {
        for label in ["scheduled", "available", "waiting_external"] {
            let value = catalog::job_state(label).expect("a state");
            assert_eq!(catalog::enum_label(value).as_deref(), Some(label));
        }
        assert!(catalog::job_state("lost").is_err());
    }
}
