"""Page checksums, which make hint bits cost WAL."""

from .. import acts
from ..rig import Rig
from .cell import Cell

JOBS = 200_000


def run(r):
    jobs = r.size(JOBS)
    own, with_checksums = r.rig, Rig(checksums=True, name="checksums")
    try:
        r.alternate(lambda: life(r, own, "off", jobs), lambda: life(r, with_checksums, "on", jobs))
        with_checksums.settle()
        with_checksums.check()
    finally:
        r.rig = own
        with_checksums.destroy()


def life(r, rig, checksums, jobs):
    r.rig = rig
    assert rig.conn.value("SHOW data_checksums") == checksums
    bare = f"COPY of 1,000 rows, checksums {checksums}"
    r.measure(bare, lambda: acts.copy(rig, jobs), jobs, "DO loop")
    # Who first reads a row sets its hint bits; the first change of a page after a
    # checkpoint logs all of it, and with checksums that is one.
    whole_life(r, rig, jobs, bare, f"checksums {checksums}", checkpoint=False)
    whole_life(r, rig, jobs, bare, f"checksums {checksums}, checkpoint between", checkpoint=True)
    rig.expect("life", completed_total=2 * jobs)


def whole_life(r, rig, jobs, bare, name, checkpoint):
    enqueue = r.measure(f"insert_jobs of 1,000, {name}",
                        lambda: acts.enqueue(rig.conn, "life", jobs), jobs, "DO loop", bare)
    drain = r.measure(f"complete_and_claim(500), {name}",
                      lambda: acts.drain_in_one_call(rig.conn, "life", 500), jobs, "DO loop",
                      checkpoint=checkpoint)
    r.note(f"a job's whole life in batches, {name}", {
        key: enqueue[key] + drain[key] for key in ("wal_bytes_per_job", "cpu_us_per_job")})


CELLS = [Cell("checksums", "Whole life in batches, with page checksums off and on.", run)]
