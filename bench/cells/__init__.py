"""The cells: each a function that measures one question, a file a subject."""

from . import (
    args,
    backlog,
    checksums,
    deferred,
    drain,
    enqueue,
    foreground,
    growth,
    idle,
    latency,
    mixed,
    ownership,
    pinned,
    producers,
    queues,
    rescue,
    single,
)

# In the order in which they run.
CELLS = {
    cell.name: cell
    for module in (
        enqueue, producers, single, drain, mixed, latency, pinned, queues, args, checksums, foreground,
        idle, rescue, ownership, deferred, backlog, growth,
    )
    for cell in module.CELLS
}
