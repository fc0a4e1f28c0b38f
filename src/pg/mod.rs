//! The one place for `unsafe`: a safe wrapper for each Postgres primitive.
