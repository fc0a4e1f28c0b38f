//! The SQL functions: arguments and access are checked here, the rest is called.

mod access;
mod args;
mod callback;
mod cancel;
mod claim;
mod close;
mod compat;
mod control;
mod descriptors;
mod dlq;
mod filter;
mod grants;
mod jobs;
mod look;
mod metrics;
mod operate;
pub mod preload;
mod produce;
mod progress;
mod queue;
mod rescue;
mod result;
mod revive;
mod runtime;
mod settings;
mod unique;
