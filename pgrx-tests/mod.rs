//! Tests that run inside a server, in a transaction that is rolled back: the wrappers of
//! `pg` against the real thing. What needs two sessions or a crash is in `tests`.

mod catalog;
mod errors;
mod heap;
mod json;
mod spi;
