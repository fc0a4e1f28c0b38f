//! The tables. Rows on the hot path are written and read through the table AM; SQL text
//! stands beside the function that runs it, for everything else.

pub mod acl;
pub mod attempts;
pub mod body;
pub mod changes;
pub mod chunks;
pub mod claim_index;
pub mod claims;
pub mod closures;
pub mod controls;
pub mod deferred;
pub mod descriptors;
pub mod dlq;
pub mod done;
pub mod epochs;
pub mod errors;
pub mod evidence;
pub mod history;
pub mod identity;
pub mod job_table;
pub mod jobs;
pub mod kept;
pub mod lanes;
pub mod outcome;
pub mod pauses;
pub mod queues;
pub mod recoveries;
pub mod runtimes;
pub mod segments;
pub mod settings;
pub mod throttles;
pub mod timeline;
pub mod unique;
