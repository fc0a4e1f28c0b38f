//! Filters of bulk acts on jobs.

use serde_json::Value;

use super::args::options;
use crate::domain::unique::State;
use crate::error::{Error, Result};
use crate::pg::datum;
use crate::store::body::Body;

const KEYS: &[&str] = &["queue", "kind", "tag", "state", "ids", "before", "after", "allow_all"];

/// Which jobs are meant: those that pass all that is given.
pub struct Filter {
    pub queue: Option<String>,
    kind: Option<String>,
    tag: Option<String>,
    state: Option<State>,
    /// Sorted.
    ids: Option<Vec<i64>>,
    before: Option<i64>,
    after: Option<i64>,
}

impl Filter {
    /// 22023 for an unknown key, and for a filter that lets everything through without saying
    /// so.
    pub fn parse(value: Value) -> Result<Self> {
        let given = options(value, "filter", KEYS)?;
        let get = |key: &str| given.get(key).filter(|value| !value.is_null());
        let text = |key: &str| match get(key) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text.clone())),
            Some(_) => Err(Error::invalid(format!("{key} must be a text"))),
        };
        let time = |key: &str| match text(key)? {
            None => Ok(None),
            Some(text) => datum::parse_timestamp(&text).map(|at| Some(at.0)),
        };
        let state = text("state")?
            .map(|label| {
                let unknown = || Error::invalid(format!("unknown state \"{label}\" in filter"));
                State::from_label(&label).ok_or_else(unknown)
            })
            .transpose()?;
        let filter = Self {
            queue: text("queue")?,
            kind: text("kind")?,
            tag: text("tag")?,
            state,
            ids: get("ids").map(ids).transpose()?,
            before: time("before")?,
            after: time("after")?,
        };
        let allows_all = match get("allow_all") {
            None => false,
            Some(Value::Bool(allows)) => *allows,
            Some(_) => return Err(Error::invalid("allow_all must be true or false")),
        };
        if !allows_all && given.iter().all(|(key, value)| key == "allow_all" || value.is_null()) {
            return Err(Error::invalid("the filter is empty")
                .hint("Say {\"allow_all\": true} if all jobs are meant."));
        }
        Ok(filter)
    }

    pub fn admits(&self, job_id: i64, queue: &str, body: &Body, state: State) -> bool {
        self.queue.as_ref().is_none_or(|name| name == queue)
            && self.state.is_none_or(|wanted| wanted == state)
            && self.ids.as_ref().is_none_or(|ids| ids.binary_search(&job_id).is_ok())
            && self.before.is_none_or(|before| body.created_at < before)
            && self.after.is_none_or(|after| body.created_at > after)
            && self.kind.as_ref().is_none_or(|kind| *kind == datum::own_text(body.kind))
            && self.tag.as_ref().is_none_or(|tag| {
                body.tags.is_some_and(|tags| datum::own_texts(tags).contains(tag))
            })
    }
}

fn ids(value: &Value) -> Result<Vec<i64>> {
    let wrong = || Error::invalid("ids must be an array of job ids");
    // Ids exceed what some clients can say as a number.
    let id = |value: &Value| {
        let parsed = value.as_str().and_then(|text| text.parse().ok());
        value.as_i64().or(parsed).ok_or_else(wrong)
    };
    let mut ids = value.as_array().ok_or_else(wrong)?.iter().map(id).collect::<Result<Vec<_>>>()?;
    ids.sort_unstable();
    Ok(ids)
}
