//! The SQL functions: arguments and access are checked here, the rest is called.

pub mod preload;
