//! The SQL functions: arguments and access are checked here, the rest is called.

mod access;
mod args;
mod claim;
mod close;
mod grants;
mod jobs;
mod metrics;
mod operate;
pub mod preload;
mod produce;
mod queue;
mod rescue;
mod runtime;
mod unique;
