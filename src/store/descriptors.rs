//! What applications say about their queues and kinds of jobs, for those who look at them.

use std::collections::{HashMap, HashSet};

use crate::error::{Error, Result};
use crate::pg::datum::{Datum, Timestamp};
use crate::pg::spi::{self, Arg};

/// What is described.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    Queue,
    Kind,
}

impl Subject {
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "queue" => Some(Self::Queue),
            "kind" => Some(Self::Kind),
            _ => None,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Kind => "kind",
        }
    }
}

/// As it is declared.
pub struct New<'a> {
    pub name: &'a str,
    pub display_name: Option<&'a str>,
    pub description: Option<&'a str>,
    pub owner: Option<&'a str>,
    pub docs_url: Option<&'a str>,
    pub tags: Vec<String>,
    /// A JSON object, as text.
    pub extra: String,
    pub hash: &'a str,
    /// How often it is declared again, milliseconds.
    pub sync_interval: i64,
}

macro_rules! upsert {
    ($table:literal, $name:literal) => {
        concat!(
            "INSERT INTO awa.", $table, " AS d (", $name, ", display_name, description, owner, \
             docs_url, tags, extra, descriptor_hash, sync_interval_ms, created_at, updated_at, \
             last_seen_at) \
             SELECT $1, $2, $3, $4, $5, $6, $7::pg_catalog.jsonb, $8, $9, t, t, t \
             FROM pg_catalog.clock_timestamp() AS t \
             ON CONFLICT (", $name, ") DO UPDATE SET display_name = excluded.display_name, \
             description = excluded.description, owner = excluded.owner, \
             docs_url = excluded.docs_url, tags = excluded.tags, extra = excluded.extra, \
             descriptor_hash = excluded.descriptor_hash, \
             sync_interval_ms = excluded.sync_interval_ms, \
             updated_at = CASE d.descriptor_hash OPERATOR(pg_catalog.=) excluded.descriptor_hash \
                 WHEN true THEN d.updated_at ELSE excluded.updated_at END, \
             last_seen_at = excluded.last_seen_at \
             RETURNING d.updated_at OPERATOR(pg_catalog.=) d.last_seen_at"
        )
    };
}

const UPSERT_QUEUE: &str = upsert!("queue_descriptors", "queue");
const UPSERT_KIND: &str = upsert!("job_kind_descriptors", "kind");

const DECLARE: &str = "
INSERT INTO awa.descriptor_declarations (runtime, subject, name, descriptor_hash)
VALUES ($1, $2, $3, $4)
ON CONFLICT (runtime, subject, name) DO UPDATE SET descriptor_hash = excluded.descriptor_hash
WHERE descriptor_declarations.descriptor_hash
    OPERATOR(pg_catalog.<>) excluded.descriptor_hash";

/// Writes a descriptor, and that it was seen now. True when it is another one than before.
///
/// * `runtime` - who declares it
pub fn upsert(subject: Subject, new: &New<'_>, runtime: Option<[u8; 16]>) -> Result<bool> {
    let statement = match subject {
        Subject::Queue => UPSERT_QUEUE,
        Subject::Kind => UPSERT_KIND,
    };
    let args = [
        Arg::of(new.name),
        Arg::opt(new.display_name),
        Arg::opt(new.description),
        Arg::opt(new.owner),
        Arg::opt(new.docs_url),
        Arg::text_array(&new.tags),
        Arg::of(new.extra.as_str()),
        Arg::of(new.hash),
        Arg::of(new.sync_interval),
    ];
    spi::as_owner(|spi| {
        let changed = spi.query_one(statement, &args, |row| Ok(row.bool(1)))?;
        if let Some(runtime) = runtime {
            let args =
                [Arg::of(runtime), Arg::of(subject.name()), Arg::of(new.name), Arg::of(new.hash)];
            spi.execute(DECLARE, &args)?;
        }
        Ok(changed.flatten().unwrap_or(false))
    })
}

/// A descriptor as it is read.
pub struct Descriptor {
    pub name: String,
    /// display_name, description, owner, docs_url, tags, extra: as the columns have them.
    pub texts: [Option<Datum>; 6],
    pub hash: String,
    pub sync_interval: i64,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
    pub last_seen_at: Timestamp,
}

macro_rules! read {
    ($table:literal, $name:literal) => {
        concat!(
            "SELECT ",
            $name,
            ", display_name, description, owner, docs_url, tags, extra, \
             descriptor_hash, sync_interval_ms, created_at, updated_at, last_seen_at \
             FROM awa.",
            $table,
            " ORDER BY 1"
        )
    };
}

const READ_QUEUES: &str = read!("queue_descriptors", "queue");
const READ_KINDS: &str = read!("job_kind_descriptors", "kind");

pub fn read_all(subject: Subject) -> Result<Vec<Descriptor>> {
    let statement = match subject {
        Subject::Queue => READ_QUEUES,
        Subject::Kind => READ_KINDS,
    };
    let missing = || Error::internal("a descriptor lacks a value");
    spi::as_owner(|spi| {
        spi.query(statement, &[])?.collect(|row| {
            Ok(Descriptor {
                name: row.text(1).ok_or_else(missing)?,
                texts: core::array::from_fn(|at| row.copied_varlena(at as i32 + 2)),
                hash: row.text(8).ok_or_else(missing)?,
                sync_interval: row.i64(9).ok_or_else(missing)?,
                created_at: row.timestamp(10).ok_or_else(missing)?,
                updated_at: row.timestamp(11).ok_or_else(missing)?,
                last_seen_at: row.timestamp(12).ok_or_else(missing)?,
            })
        })
    })
}

const DECLARED: &str = "
SELECT runtime, name, descriptor_hash FROM awa.descriptor_declarations
WHERE subject OPERATOR(pg_catalog.=) $1";

/// What runtimes that `lives` says are there declare, by name.
pub fn declared(
    subject: Subject,
    lives: impl Fn(&[u8; 16]) -> Result<bool>,
) -> Result<HashMap<String, HashSet<String>>> {
    let rows = spi::as_owner(|spi| {
        spi.query(DECLARED, &[Arg::of(subject.name())])?.collect(|row| {
            Ok((
                row.uuid(1).unwrap_or_default(),
                row.text(2).unwrap_or_default(),
                row.text(3).unwrap_or_default(),
            ))
        })
    })?;
    let mut hashes: HashMap<String, HashSet<String>> = HashMap::new();
    for (runtime, name, hash) in rows {
        if lives(&runtime)? {
            hashes.entry(name).or_default().insert(hash);
        }
    }
    Ok(hashes)
}

const FORGOTTEN: [&str; 3] = [
    "DELETE FROM awa.queue_descriptors WHERE queue OPERATOR(pg_catalog.=) ANY (ARRAY(
        SELECT queue FROM awa.queue_descriptors
        WHERE last_seen_at OPERATOR(pg_catalog.<)
            (pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) '30 days'::pg_catalog.interval)
        LIMIT 1000 FOR UPDATE SKIP LOCKED))",
    "DELETE FROM awa.job_kind_descriptors WHERE kind OPERATOR(pg_catalog.=) ANY (ARRAY(
        SELECT kind FROM awa.job_kind_descriptors
        WHERE last_seen_at OPERATOR(pg_catalog.<)
            (pg_catalog.clock_timestamp() OPERATOR(pg_catalog.-) '30 days'::pg_catalog.interval)
        LIMIT 1000 FOR UPDATE SKIP LOCKED))",
    "DELETE FROM awa.descriptor_declarations WHERE runtime OPERATOR(pg_catalog.=) ANY (ARRAY(
        SELECT runtime FROM awa.descriptor_declarations AS d
        WHERE NOT EXISTS (SELECT FROM awa.runtimes AS r
                          WHERE r.runtime OPERATOR(pg_catalog.=) d.runtime
                            AND r.ended_at IS NULL)
        LIMIT 1000 FOR UPDATE SKIP LOCKED))",
];

/// Forgets descriptors that nobody has declared for a month, and what runtimes declared that
/// are gone. Waits for nobody.
pub fn clean_up() -> Result<u64> {
    spi::as_owner(|spi| {
        FORGOTTEN.iter().try_fold(0, |gone, statement| Ok(gone + spi.execute(statement, &[])?))
    })
}
