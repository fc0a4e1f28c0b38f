"""Random acts, legal and illegal, from several sessions, against a model of jobs' lives.

`AWA_LIFE_SECONDS` (20) says for how long, `AWA_LIFE_SEED` repeats a run. `make soak`
runs it for minutes.
"""

import os
import random
import time
import uuid

import psycopg
from psycopg.types.json import Jsonb

from harness import Background, raises, wait_blocked, wait_until
from life import HOLDING, TERMINAL, Job, Life

SECONDS = float(os.environ.get("AWA_LIFE_SECONDS", "20"))
SEED = int(os.environ.get("AWA_LIFE_SEED", str(time.time_ns() % 1_000_000)))

# Of the story of a run that failed, how many are told.
LINES = int(os.environ.get("AWA_LIFE_LINES", "80"))

QUEUES = ["plain", "letters"]
KEYS = ["red", "blue", "green"]
HOUR = "1 hour"


class Session:
    def __init__(self, db):
        self.db = db
        self.connect()

    def connect(self):
        self.conn = self.db.connect()
        # A wait that nobody ends is a finding, not a timeout of the test.
        self.conn.execute("SET statement_timeout = '15s'")
        self.runtime = self.conn.value("SELECT awa.register_runtime()")


class World:
    def __init__(self, db, seed):
        self.db = db
        self.dice = random.Random(seed)
        self.life = Life(letters={"letters"})
        self.log = []
        for queue in QUEUES:
            db.execute(
                "SELECT awa.configure_queue(%s, %s)", queue,
                Jsonb({
                    "dlq_enabled": queue in self.life.letters,
                    # Time would have to be modelled: an hour is for ever.
                    "backoff": {"base": HOUR, "factor": 1, "jitter": 0, "max": HOUR},
                    "priority_aging": "0",
                }),
            )
        self.sessions = [Session(db) for _ in range(4)]
        self.acts = [
            (14, self.insert), (14, self.claim), (10, self.complete), (5, self.complete_many),
            (8, self.fail), (5, self.snooze), (4, self.release_attempts), (3, self.cancel_attempt),
            (3, self.set_progress), (2, self.extend), (6, self.park), (8, self.resolve),
            (6, self.cancel_job), (3, self.cancel_by_key), (5, self.retry_job), (3, self.delete_job),
            (3, self.dlq_retry), (2, self.dlq_move), (6, self.look), (2, self.stats),
            (2, self.nothing),
            (6, self.begin), (4, self.savepoint), (10, self.end), (5, self.race), (1, self.leave),
        ]

    def run(self, seconds):
        weights, acts = zip(*self.acts, strict=True)
        end, steps = time.monotonic() + seconds, 0
        while time.monotonic() < end:
            session = self.dice.choice(self.sessions)
            self.dice.choices(acts, weights)[0](session)
            steps += 1
            if steps % 500 == 0:
                self.settle()
        self.settle()
        return steps

    def note(self, session, what, *arguments):
        number = self.sessions.index(session)
        self.log.append(f"{number}: {what} {' '.join(map(str, arguments))}")

    # Asking the server

    def ask(self, session, query, *params):
        self.note(session, query, *params)
        rows = session.conn.rows(query, *params)
        self.log[-1] += f" -> {rows}"
        return rows

    def answer(self, session, query, *params):
        """The value, or the SQLSTATE of the refusal, which leaves the transaction as it was."""
        in_transaction = session in self.life.frames
        if in_transaction:
            session.conn.execute("SAVEPOINT act")
        try:
            (value,), = self.ask(session, query, *params)
        except psycopg.Error as error:
            if in_transaction:
                session.conn.execute("ROLLBACK TO act")
            value = error.diag.sqlstate
        if in_transaction:
            session.conn.execute("RELEASE act")
        return value

    def expect(self, session, expected, query, *params):
        found = self.answer(session, query, *params)
        assert found == expected, f"{found!r} instead of {expected!r}"

    # Choosing

    def any_job(self, session):
        """A job that nobody's open transaction has to do with."""
        jobs = [job for job in self.life.jobs.values()
                if self.life.owner(job) is None and job.state != "deleted"]
        # Those in the middle of their lives are more interesting than the dead.
        alive = [job for job in jobs if job.state not in TERMINAL]
        pool = alive if alive and self.dice.random() < 0.6 else jobs
        return self.dice.choice(pool) if pool else None

    def any_receipt(self, session):
        """A receipt and the running job that it is good for, if any. None: ask another day."""
        if self.dice.random() < 0.1:
            return self.dice.choice([0, -1, 1, 2**63 - 1, self.dice.getrandbits(62)]), None
        running = [job for job in self.life.jobs.values()
                   if job.state == "running" and self.life.owner(job) in (None, session)]
        if running and self.dice.random() < 0.8:
            job = self.dice.choice(running)
            return job.receipt, job
        if not self.life.receipts:
            return None
        receipt = self.dice.choice(self.life.receipts)
        for job in self.life.jobs.values():
            if job.receipt == receipt and self.life.owner(job) not in (None, session):
                return None
        return receipt, self.life.by_receipt(session, receipt)

    # Producing

    def insert(self, session):
        life, dice = self.life, self.dice
        key = dice.choice(KEYS) if dice.random() < 0.4 else None
        if key and life.key_is_touched(key, session):
            return
        conflict = dice.choice(["return", "error", "replace"]) if key else "return"
        holder = life.holder(key) if key else None
        if holder and life.owner(holder) == session:
            return
        job = Job(
            0, dice.choice(QUEUES), dice.randint(1, 4), dice.randint(1, 3), key,
            {"n": dice.getrandbits(30)},
            "scheduled" if dice.random() < 0.15 else "available",
        )
        found = self.answer(
            session,
            "SELECT awa.insert_job('k', %s, %s, %s, now() + %s::interval, %s, unique_key => %s,"
            " opts => %s)",
            Jsonb(job.args), job.queue, job.priority,
            HOUR if job.state == "scheduled" else "0", job.max_attempts, key,
            Jsonb({"on_conflict": conflict} if key else {}),
        )
        if holder is None:
            assert isinstance(found, int) and found not in life.jobs, found
            job.job_id = found
            life.add(session, job)
        elif conflict == "error":
            assert found == "23505", found
        else:
            assert found == holder.job_id, f"{found!r} instead of {holder.job_id}"
            if conflict == "replace" and holder.state in ("available", "scheduled", "retryable"):
                life.touch(session, holder)
                holder.args, holder.priority = job.args, job.priority

    # Working

    def claim(self, session):
        life, dice = self.life, self.dice
        queue, most = dice.choice(QUEUES), dice.choice([1, 1, 2, 5])
        runtime = session.runtime if dice.random() < 0.5 else None
        may, must = life.claimable(queue)
        rows = self.ask(
            session,
            "SELECT receipt, job_id, attempt, max_attempts, args, priority, progress"
            " FROM awa.claim(%s, %s, %s, %s)",
            queue, most, runtime, HOUR,
        )
        assert len(rows) <= most and (rows or not must), f"none of {must}"
        by_id = {job.job_id: job for job in may}
        for receipt, job_id, attempt, max_attempts, args, priority, progress in rows:
            assert job_id in by_id, f"job {job_id} cannot be claimed: {life.jobs.get(job_id)}"
            job = by_id.pop(job_id)
            assert all(receipt > earlier for earlier in life.receipts), "receipts grow"
            better = [other for other in by_id.values()
                      if other.is_sure and other.priority < priority]
            assert not better, f"job {job_id} before {better}"
            life.claim(session, job, receipt, runtime)
            assert (attempt, max_attempts, args, priority) == (
                job.attempt, job.max_attempts, job.args, job.priority)
            assert (progress or {}).get("percent") == job.progress

    def complete(self, session):
        if (found := self.any_receipt(session)) is None:
            return
        receipt, job = found
        result = self.dice.getrandbits(20)
        self.expect(
            session, "" if job else "AW001", "SELECT awa.complete(%s, %s)", receipt, Jsonb(result)
        )
        if job:
            self.life.end(session, job, "completed")
            job.result = result

    def complete_many(self, session):
        found = [self.any_receipt(session) for _ in range(self.dice.randint(0, 4))]
        found = [pair for pair in found if pair]
        distinct = dict(found)
        rows = self.ask(
            session, "SELECT * FROM awa.complete_many(%s::bigint[])", [r for r, _ in found]
        )
        assert rows == [(receipt, job is not None) for receipt, job in distinct.items()]
        for job in distinct.values():
            if job:
                self.life.end(session, job, "completed")
                job.result = None

    def fail(self, session):
        if (found := self.any_receipt(session)) is None:
            return
        receipt, job = found
        terminal, after = self.dice.random() < 0.15, self.dice.choice(["0", "0", HOUR, None])
        error = f"broken {self.dice.getrandbits(20)}"
        expected = "AW001"
        if job:
            expected = self.life.fail(session, job, error, terminal, after == "0")
        self.expect(
            session, expected, "SELECT awa.fail(%s, %s, %s, %s)::text",
            receipt, error, after, terminal,
        )

    def snooze(self, session):
        if (found := self.any_receipt(session)) is None:
            return
        receipt, job = found
        delay = self.dice.choice(["0", HOUR])
        self.expect(
            session, "" if job else "AW001", "SELECT awa.snooze(%s, %s)", receipt, delay
        )
        if job:
            short = delay == "0"
            self.life.give_back(
                session, job, "available" if short else "scheduled", "scheduled" if short else None
            )

    def release_attempts(self, session):
        found = [self.any_receipt(session) for _ in range(self.dice.randint(0, 3))]
        distinct = dict(pair for pair in found if pair)
        good = [job for job in distinct.values() if job]
        # Those that were asked to stop are cancelled.
        back = sum(not job.asked for job in good)
        self.expect(session, back, "SELECT awa.release(%s::bigint[])", list(distinct))
        for job in good:
            self.life.give_back(session, job, "available")

    def cancel_attempt(self, session):
        if (found := self.any_receipt(session)) is None:
            return
        receipt, job = found
        self.expect(
            session, "" if job else "AW001", "SELECT awa.cancel_attempt(%s, 'no')", receipt
        )
        if job:
            self.life.end(session, job, "cancelled")

    def set_progress(self, session):
        if (found := self.any_receipt(session)) is None:
            return
        receipt, job = found
        percent = self.dice.randint(-50, 150)
        self.expect(
            session, "" if job else "AW001", "SELECT awa.set_progress(%s, %s)", receipt, percent
        )
        if job:
            self.life.touch(session, job)
            job.progress = min(max(percent, 0), 100)

    def extend(self, session):
        if (found := self.any_receipt(session)) is None:
            return
        receipt, job = found
        rows = self.ask(
            session, "SELECT receipt FROM awa.extend(%s::bigint[], '1 minute')", [receipt]
        )
        assert rows == ([(receipt,)] if job else [])

    # Callbacks

    def park(self, session):
        if (found := self.any_receipt(session)) is None:
            return
        receipt, job = found
        query = "SELECT awa.register_callback(%s, %s)::text"
        if job is None:
            parked = [j for j in self.life.jobs.values()
                      if j.receipt == receipt and j.state == "waiting_external"]
            if not parked:
                self.expect(session, "AW001", query, receipt, HOUR)
            return
        token = self.answer(session, query, receipt, HOUR)
        self.life.touch(session, job)
        assert uuid.UUID(token)
        job.token = token
        if self.dice.random() < 0.8:
            self.expect(session, "", "SELECT awa.wait_for_callback(%s)", receipt)
            job.state = "waiting_external"

    def resolve(self, session):
        life, dice = self.life, self.dice
        pool = [job for job in life.jobs.values()
                if job.token and life.owner(job) in (None, session)]
        job = dice.choice(pool) if pool and dice.random() < 0.9 else None
        token = job.token if job else str(uuid.UUID(int=dice.getrandbits(128)))
        parked = job is not None and job.state == "waiting_external"
        how = dice.choice(["complete", "fail", "retry", "resume", "cancel"])
        if how == "cancel":
            expected = False if job is None else "55000" if parked else True
            self.expect(session, expected, "SELECT awa.cancel_callback(%s)", token)
            if expected is True:
                life.touch(session, job)
                job.token = None
            return
        if how == "resume":
            expected = job.receipt if job else "P0002"
            self.expect(session, expected, "SELECT awa.resume_external(%s, '7')", token)
            if job:
                life.touch(session, job)
                job.state, job.token = "running", None
            return
        call = {"complete": "complete_external(%s, '7')", "fail": "fail_external(%s, 'outside')",
                "retry": "retry_external(%s)"}[how]
        expected = "P0002"
        if job:
            expected = {"complete": "completed", "fail": "failed", "retry": "available"}[how]
            if how == "retry" and not parked:
                expected = "55000"
            elif how != "complete" and job.asked:
                expected = "cancelled"
        self.expect(session, expected, f"SELECT awa.{call}::text", token)
        if job is None or expected == "55000":
            return
        if expected == "available":
            life.touch(session, job)
            job.stop_running("available")
            job.attempt = 0
        else:
            life.end(session, job, expected, "outside" if how == "fail" else None)
            job.result = 7 if expected == "completed" else None

    # Operating

    def cancel_job(self, session):
        if (job := self.any_job(session)) is None:
            return
        force = self.dice.random() < 0.3
        asks = job.state == "running" and not force
        expected = job.state if asks or job.state in TERMINAL else "cancelled"
        self.expect(
            session, expected, "SELECT awa.cancel_job(%s, 'stop', %s)::text", job.job_id, force
        )
        if asks:
            self.life.touch(session, job)
            job.asked = True
        elif job.state not in TERMINAL:
            self.life.end(session, job, "cancelled")

    def cancel_by_key(self, session):
        key = self.dice.choice(KEYS)
        if self.life.key_is_touched(key):
            return
        job = self.life.holder(key)
        self.expect(
            session, job and job.job_id, "SELECT awa.cancel_by_unique_key(%s)", key
        )
        if job and job.state == "running":
            self.life.touch(session, job)
            job.asked = True
        elif job:
            self.life.end(session, job, "cancelled")

    def revive(self, session, job):
        self.life.touch(session, job)
        job.state, job.attempt, job.letter = "available", 0, False

    def key_is_free(self, job):
        """None: an open transaction is about to say."""
        if job.key is None:
            return True
        if self.life.key_is_touched(job.key):
            return None
        return self.life.holder(job.key) in (None, job)

    def retry_job(self, session):
        if (job := self.any_job(session)) is None or (free := self.key_is_free(job)) is None:
            return
        if job.state == "waiting_external":
            return self.retry_parked(session, job)
        can = job.state in ("failed", "cancelled") and not job.letter
        expected = "55000" if not can else "available" if free else "23505"
        self.expect(session, expected, "SELECT awa.retry_job(%s)::text", job.job_id)
        if expected == "available":
            self.revive(session, job)

    def retry_parked(self, session, job):
        """As any end but completion: cancelled, if it was asked to stop."""
        expected = "cancelled" if job.asked else "available"
        self.expect(session, expected, "SELECT awa.retry_job(%s)::text", job.job_id)
        if job.asked:
            self.life.end(session, job, "cancelled")
        else:
            self.life.touch(session, job)
            job.stop_running("available")
            job.attempt = 0

    def dlq_retry(self, session):
        if (job := self.any_job(session)) is None or (free := self.key_is_free(job)) is None:
            return
        expected = "55000" if not job.letter else "available" if free else "23505"
        self.expect(session, expected, "SELECT awa.dlq_retry(%s)::text", job.job_id)
        if expected == "available":
            self.revive(session, job)

    def dlq_move(self, session):
        if (job := self.any_job(session)) is None:
            return
        expected = "55000" if job.state != "failed" else not job.letter
        self.expect(session, expected, "SELECT awa.dlq_move(%s, 'by hand')", job.job_id)
        if expected is True:
            self.life.touch(session, job)
            job.letter = True

    def delete_job(self, session):
        if (job := self.any_job(session)) is None:
            return
        can = job.state not in ("running", "completed")
        self.expect(
            session, True if can else "55000", "SELECT awa.delete_job(%s)", job.job_id
        )
        if can:
            self.life.touch(session, job)
            job.stop_running("deleted")
            job.letter, job.soon = False, None

    def nothing(self, session):
        """Acts on a job that is gone or never was."""
        gone = [job.job_id for job in self.life.jobs.values()
                if job.state == "deleted" and self.life.owner(job) is None]
        job_id = self.dice.choice([0, -1, 5, 2**63 - 1, *gone])
        call = self.dice.choice(["cancel_job(%s)::text", "retry_job(%s)::text", "delete_job(%s)",
                                 "dlq_retry(%s)::text", "dlq_move(%s, 'x')"])
        self.expect(session, "P0002", f"SELECT awa.{call}", job_id)

    # Looking

    def look(self, session):
        if not self.life.jobs:
            return
        job_id = self.dice.choice(list(self.life.jobs))
        rows = self.ask(
            session,
            "SELECT state::text, attempt, args, priority, queue, errors, progress, run_lease,"
            " callback_id::text FROM awa.get_job(%s)",
            job_id,
        )
        job = self.life.seen(session, job_id)
        if job is None or job.state == "deleted":
            assert rows == [], rows
            return
        (state, attempt, args, priority, queue, errors, progress, receipt, token), = rows
        assert state in job.states, f"{state} instead of {job.states}"
        assert (attempt, args, priority, queue, token) == (
            job.attempt, job.args, job.priority, job.queue, job.token), job
        told = [error["error"] for error in errors or []]
        assert [error for error in told if error.startswith(("broken", "outside"))] == job.errors
        assert (progress or {}).get("percent") == job.progress
        if state in ("running", "waiting_external"):
            assert receipt == job.receipt
        if state == "completed":
            result, = self.ask(session, "SELECT awa.get_result(%s)", job_id)
            assert result == (job.result,)

    def stats(self, session):
        """Exact when nothing is open; a reader must not fail at any time."""
        rows = self.ask(
            session,
            "SELECT queue, scheduled, available, running, retryable, waiting_external, dlq,"
            " completed_total, failed_total, cancelled_total FROM awa.queue_stats",
        )
        if self.life.frames:
            return
        for queue, *found in rows:
            jobs = [job for job in self.life.jobs.values() if job.queue == queue]
            soon = sum(job.soon is not None for job in jobs)

            def count(state, jobs=jobs):
                return sum(job.state == state for job in jobs)

            scheduled, available, running, retryable, waiting, letters, *totals = found
            assert (running, waiting) == (count("running"), count("waiting_external")), found
            assert letters == sum(job.letter for job in jobs)
            waiting_jobs = sum(map(count, ("scheduled", "available", "retryable")))
            assert scheduled + available + retryable == waiting_jobs, found
            assert count("available") - soon <= available <= count("available"), found
            expected = self.life.totals.get(queue, {})
            assert totals == [expected.get(s, 0) for s in ("completed", "failed", "cancelled")]

    # Transactions

    def begin(self, session):
        if session in self.life.frames:
            return
        self.note(session, "BEGIN")
        session.conn.begin()
        self.life.begin(session)

    def savepoint(self, session):
        if session not in self.life.frames:
            return
        if len(self.life.frames[session]) == 1:
            self.ask(session, "SAVEPOINT s")
            self.life.savepoint(session)
        elif self.dice.random() < 0.5:
            self.ask(session, "ROLLBACK TO s")
            self.life.undo(session)
        else:
            self.ask(session, "RELEASE s")
            self.life.release(session)

    def end(self, session):
        if session not in self.life.frames:
            return
        if self.dice.random() < 0.7:
            self.ask(session, "COMMIT")
            self.life.commit(session)
        else:
            self.ask(session, "ROLLBACK")
            self.life.rollback(session)

    def race(self, session):
        """Closes what another one's open transaction has closed, and waits for its end."""
        life = self.life
        closed = []
        for other, frames in life.frames.items():
            if other is session:
                continue
            for frame in frames:
                closed += [(other, before) for job_id, before in frame.items()
                           if before is not None and before.state == "running"
                           and life.jobs[job_id].state in (*TERMINAL, "available", "scheduled")
                           and life.jobs[job_id].receipt == before.receipt]
        if session in life.frames or not closed:
            return
        other, before = self.dice.choice(closed)
        self.note(session, "waits to complete", before.receipt)
        waiting = Background(
            session.conn.execute, "SELECT awa.complete(%s)", (before.receipt,)
        )
        wait_blocked(self.db.conn, session.conn.pid)
        assert not waiting.done
        self.end(other)
        job = life.by_receipt(session, before.receipt)
        if job is None:
            with raises("AW001"):
                waiting.result()
        else:
            waiting.result()
            life.end(session, job, "completed")
            job.result = None

    def leave(self, session):
        """The session dies with whatever it has open, and is born again."""
        life = self.life
        self.note(session, "dies")
        if session in life.frames:
            life.rollback(session)
        # What other open transactions do to its attempts decides whether they are lost.
        for other in [s for s in self.sessions if s in life.frames]:
            if any(before is not None and before.session is session
                   for frame in life.frames[other] for before in frame.values()):
                self.end(other)
        lost = [job for job in life.jobs.values()
                if job.session is session and job.state == "running"]
        self.db.execute("SELECT pg_terminate_backend(%s, 10000)", session.conn.pid)
        session.conn.close()
        for job in lost:
            life.fail(session, job, None, terminal=False, at_once=False)
            self.db.wait_state(job.job_id, job.state)
        for job in life.jobs.values():
            if job.session is session:
                job.session = None
        session.connect()

    def settle(self):
        """Ends all transactions and compares the whole world."""
        for session in self.sessions:
            self.end(session)
            if session in self.life.frames:
                self.end(session)
        wait_until(self.nothing_is_due, 5, what="released jobs to be available")
        for job in self.life.jobs.values():
            job.soon = None
        session = self.sessions[0]
        self.stats(session)
        found = dict(self.ask(session, "SELECT id, state::text FROM awa.jobs"))
        expected = {job.job_id: job.state for job in self.life.jobs.values()
                    if job.state != "deleted"}
        assert found == expected, set(found.items()) ^ set(expected.items())
        held = self.ask(session, "SELECT count(*) FROM awa.job_unique_claims")
        assert held == [(sum(job.key is not None and job.state in HOLDING
                             for job in self.life.jobs.values()),)]
        self.db.check()
        # Old jobs are known well enough.
        for job in [job for job in self.life.jobs.values() if job.state in TERMINAL][50:]:
            if job.state == "completed":
                continue
            self.ask(session, "SELECT awa.delete_job(%s)", job.job_id)
            job.state = "deleted"
        self.life.jobs = {job_id: job for job_id, job in self.life.jobs.items()
                          if job.state not in ("deleted",)}

    def nothing_is_due(self):
        return not self.db.value(
            "SELECT count(*) FROM awa.jobs WHERE state IN ('scheduled', 'retryable')"
            " AND run_at < clock_timestamp()"
        )


def test_lives(db):
    world = World(db, SEED)
    try:
        steps = world.run(SECONDS)
    except BaseException:
        print(f"AWA_LIFE_SEED={SEED}", *world.log[-LINES:], sep="\n  ")
        raise
    print(f"AWA_LIFE_SEED={SEED}: {steps} acts")
    assert steps > 100
