//! Pure decisions and data structures: no Postgres, no unsafe, no clock.
