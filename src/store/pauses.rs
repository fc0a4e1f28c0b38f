//! `queue_pauses`, which says again what `queues` says of pauses.

use crate::error::Result;
use crate::pg::spi::{self, Arg};

const SHOW: &str = "
INSERT INTO awa.queue_pauses (queue, paused, paused_at, paused_by)
SELECT queue, paused_at IS NOT NULL, paused_at, paused_by FROM awa.queues
WHERE queue OPERATOR(pg_catalog.=) $1
ON CONFLICT (queue) DO UPDATE SET
    paused = EXCLUDED.paused, paused_at = EXCLUDED.paused_at, paused_by = EXCLUDED.paused_by";

/// Takes over what the row of a queue says.
pub fn show(queue: &str) -> Result<()> {
    spi::as_owner(|spi| spi.execute(SHOW, &[Arg::of(queue)]).map(|_| ()))
}
