"""The size of the args."""

from .. import acts
from .cell import Cell

# Bytes, jobs and jobs a call: about as much data each time.
SIZES = ((200, 200_000, 1000), (2_000, 50_000, 1000), (50_000, 4_000, 100))


def run(r):
    for size, jobs, batch in SIZES:
        life(r, size, r.size(jobs, batch), batch)


def life(r, size, jobs, batch):
    rig = r.rig
    bare = f"COPY of {batch:,} rows, args of {size:,} B"
    r.alternate(
        lambda: r.measure(bare, lambda: acts.copy(rig, jobs, size, batch), jobs, "DO loop"),
        lambda: r.measure(
            f"insert_jobs of {batch:,}, args of {size:,} B",
            lambda: acts.enqueue(rig.conn, "args", jobs, size, batch), jobs, "DO loop", bare),
    )
    read = f"read rows of a bare table by key, args of {size:,} B"
    r.alternate(
        lambda: r.measure(read, lambda: acts.read_bare(rig.conn, jobs, batch // 2), jobs,
                          "DO loop"),
        lambda: r.measure(
            f"claim({batch // 2}) + complete_many, args of {size:,} B",
            lambda: acts.drain(rig.conn, "args", batch // 2), jobs, "DO loop", read),
    )
    rig.conn.execute("TRUNCATE bare, bare_acks")
    rig.expect("args", completed_total=jobs)
    rig.balance()


CELLS = [Cell("args", "Args of 200 bytes, 2 kB and 50 kB: enqueue and drain.", run)]
