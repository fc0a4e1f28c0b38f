//! Unique keys: which states hold one, and how one is computed from a job.

/// The states of awa.job_state, in its order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum State {
    Scheduled,
    Available,
    Running,
    Completed,
    Retryable,
    Failed,
    Cancelled,
    WaitingExternal,
}

impl State {
    pub const ALL: [(Self, &'static str); 8] = [
        (Self::Scheduled, "scheduled"),
        (Self::Available, "available"),
        (Self::Running, "running"),
        (Self::Completed, "completed"),
        (Self::Retryable, "retryable"),
        (Self::Failed, "failed"),
        (Self::Cancelled, "cancelled"),
        (Self::WaitingExternal, "waiting_external"),
    ];

    pub fn from_label(label: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, known)| *known == label).map(|(state, _)| *state)
    }

    /// The job came to its end: nothing can be refused to it any more.
    pub fn is_terminal(self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }
}

/// The states in which a job holds its key: bit N from the left is state N.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mask(pub u8);

impl Mask {
    /// A job that is on its way to its end.
    pub const DEFAULT: Self = Self(0b1110_1001);

    pub fn of(states: impl IntoIterator<Item = State>) -> Self {
        Self(states.into_iter().fold(0, |bits, state| bits | 0x80 >> state as u8))
    }

    pub fn has(self, state: State) -> bool {
        self.0 & (0x80 >> state as u8) != 0
    }

    /// Whether going from one state to the other leaves the key where it is.
    pub fn same(self, one: State, other: State) -> bool {
        self.has(one) == self.has(other)
    }
}

/// What a computed key is made of; the kind is always part of it.
#[derive(Clone, Copy, Default)]
pub struct Parts<'a> {
    pub queue: Option<&'a str>,
    /// Canonical JSON.
    pub args: Option<&'a str>,
    pub period: Option<i64>,
}

/// The key of a job: equal parts, equal key. Other producers compute the same.
pub fn derive(kind: &str, parts: Parts<'_>) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(kind.as_bytes());
    for part in [parts.queue, parts.args].into_iter().flatten() {
        hasher.update(&[0]).update(part.as_bytes());
    }
    if let Some(period) = parts.period {
        hasher.update(&[0]).update(&period.to_le_bytes());
    }
    let mut key = [0; 16];
    key.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    key
}

/// Which period a time is in, counted from 1970.
///
/// * `at`, `period` - microseconds; the period is above zero
pub fn period_of(at: i64, period: i64) -> i64 {
    /// Between 1970, from which everybody counts, and 2000, from which Postgres does.
    const EPOCH: i64 = 946_684_800_000_000;
    at.saturating_add(EPOCH).div_euclid(period)
}

/// JSON without spaces and with sorted keys, everything else digit for digit. The text must
/// be well-formed, as that of a jsonb is; without recursion, since it may be deep.
pub fn canonical(json: &str) -> String {
    struct Open {
        is_object: bool,
        /// Finished members: the key with its quotes (none in arrays), the value.
        members: Vec<(String, String)>,
        key: Option<String>,
    }
    let mut open: Vec<Open> = Vec::new();
    let mut rest = json.trim_start();
    while let Some(first) = rest.chars().next() {
        let mut done = None;
        let length = match first {
            '{' | '[' => {
                open.push(Open { is_object: first == '{', members: Vec::new(), key: None });
                1
            }
            '}' | ']' => {
                done = open.pop().map(|mut closed| {
                    closed.members.sort_by_cached_key(|(key, _)| sort_key(key));
                    let members: Vec<String> =
                        closed.members.into_iter().map(|(key, value)| key + &value).collect();
                    let (left, right) = if closed.is_object { ('{', '}') } else { ('[', ']') };
                    format!("{left}{}{right}", members.join(","))
                });
                1
            }
            ',' | ':' | ' ' | '\n' | '\t' | '\r' => 1,
            '"' => {
                let length = string_length(rest);
                let string = &rest[..length];
                match open.last_mut() {
                    Some(object) if object.is_object && object.key.is_none() => {
                        object.key = Some(format!("{string}:"));
                    }
                    _ => done = Some(string.to_owned()),
                }
                length
            }
            _ => {
                let length =
                    rest.find([',', '}', ']', ' ', '\n', '\t', '\r', ':']).unwrap_or(rest.len());
                done = Some(rest[..length].to_owned());
                length
            }
        };
        rest = &rest[length..];
        if let Some(value) = done {
            match open.last_mut() {
                // Members of an array have no keys, and the sort is stable.
                Some(parent) => {
                    parent.members.push((parent.key.take().unwrap_or_default(), value));
                }
                None => return value,
            }
        }
    }
    String::new()
}

/// Keys are compared by the text they stand for, not by its escapes.
fn sort_key(quoted: &str) -> String {
    let text = quoted.strip_suffix(':').unwrap_or(quoted);
    serde_json::from_str(text).unwrap_or_else(|_| text.to_owned())
}

/// Bytes of the string literal at the start, quotes included.
fn string_length(text: &str) -> usize {
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_count_from_the_left() {
        assert_eq!(Mask::of([State::Scheduled]).0, 0b1000_0000);
        assert_eq!(Mask::of([State::WaitingExternal]).0, 1);
        use State::*;
        let default = [Scheduled, Available, Running, Retryable, WaitingExternal];
        assert_eq!(Mask::of(default), Mask::DEFAULT);
    }

    #[test]
    fn json_is_sorted_and_compact() {
        let given =
            r#" {"bb": 1.50, "a": {"é": "x, \"y\": z", "b": []}, "c": [1, {"d": null}, "]"]}"#;
        let wanted = r#"{"a":{"b":[],"é":"x, \"y\": z"},"bb":1.50,"c":[1,{"d":null},"]"]}"#;
        assert_eq!(canonical(given), wanted);
        assert_eq!(canonical(" 12345678901234567890123.10 "), "12345678901234567890123.10");
        assert_eq!(canonical("\"\\u0001\""), "\"\\u0001\"");
        let deep = "[".repeat(100_000) + &"]".repeat(100_000);
        assert_eq!(canonical(&deep[..]).len(), 200_000);
    }

    #[test]
    fn parts_are_kept_apart() {
        let of = |kind, queue, args| derive(kind, Parts { queue, args, period: None });
        assert_ne!(of("ab", Some("c"), None), of("a", Some("bc"), None));
        assert_eq!(of("k", None, Some("{}")), of("k", None, Some("{}")));
    }

    #[test]
    fn periods_count_from_1970() {
        assert_eq!(period_of(-946_684_800_000_000, 1_000_000), 0);
        assert_eq!(period_of(0, 3_600_000_000), 946_684_800 / 3600);
    }
}
