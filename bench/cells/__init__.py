"""The cells: each a function that measures one question, a file a subject."""

from . import (
    args,
    backlog,
    checksums,
    drain,
    enqueue,
    foreground,
    growth,
    idle,
    latency,
    mixed,
    ownership,
    pinned,
    queues,
    rescue,
    single,
)

# In the order in which they run.
CELLS = {
    cell.name: cell
    for module in (
        enqueue, single, drain, mixed, latency, pinned, queues, args, checksums, foreground,
        idle, rescue, ownership, backlog, growth,
    )
    for cell in module.CELLS
}
