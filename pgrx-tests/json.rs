#[pgrx::pg_schema]
mod tests {
    use pgrx::prelude::*;
    use serde_json::json;

    use crate::pg::datum::{Json, ToDatum, own_json};
    use crate::pg::json::objects;

    #[pg_test]
    fn values_pass_through_digit_for_digit() {
        let array = Json(r#"[{"a": 1.500, "b": {"c": [1, 2]}, "d": null}, {}]"#).to_datum();
        let objects = objects(array).expect("an array of objects");
        let [first, second] = objects.as_slice() else { panic!("two objects") };
        assert!(first.keys().eq(["a", "b", "d"]));
        assert_eq!(second.keys().count(), 0);
        let digits = first.datum("a").expect("a");
        // SAFETY: a jsonb that was just made.
        assert_eq!(unsafe { crate::pg::datum::json_text(digits) }, "1.500");
        assert_eq!(first.value("b"), Some(json!({ "c": [1, 2] })));
        assert_eq!(own_json(first.datum("b").expect("b")), json!({ "c": [1, 2] }));
        assert_eq!(first.value("d"), Some(serde_json::Value::Null));
        assert_eq!(first.value("e"), None);
    }

    #[pg_test]
    fn only_arrays_of_objects_are_taken() {
        for other in ["1", "{}", "[1]", "[[]]", "[{}, 1]", "\"x\"", "null"] {
            assert!(objects(Json(other).to_datum()).is_none(), "{other}");
        }
        assert_eq!(objects(Json("[]").to_datum()).map(|o| o.len()), Some(0));
    }
}
