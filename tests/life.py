"""What jobs should do: a model of their lives that is nothing but dictionaries.

The model knows the committed world and, for each open transaction, what the jobs
were before it touched them. An act is first worked out here, then done on the
server, and both answers must be equal.
"""

from dataclasses import dataclass, field, replace

TERMINAL = {"completed", "failed", "cancelled"}
# States in which a job holds its key, unless it says otherwise.
HOLDING = {"scheduled", "available", "running", "retryable", "waiting_external"}


@dataclass
class Job:
    job_id: int
    queue: str
    priority: int
    max_attempts: int
    key: str | None = None
    args: object = None
    state: str = "available"
    # The running one, or those used.
    attempt: int = 0
    receipt: int | None = None
    session: object = None  # whose end ends the attempt
    token: str | None = None
    asked: bool = False
    # Given back a moment ago: it shows the state it waits in, then available.
    soon: str | None = None
    # Claims in a row that rolled back: after three of them it has to wait a while.
    rollbacks: int = 0
    letter: bool = False
    errors: list = field(default_factory=list)
    result: object = None
    progress: object = None

    @property
    def states(self):
        """Those that a reader may see."""
        return {self.state, self.soon} - {None}

    @property
    def is_sure(self):
        """Whether a claim must not miss it."""
        return self.soon is None and self.rollbacks < 3

    def stop_running(self, state):
        self.state, self.token, self.asked, self.session = state, None, False, None
        self.rollbacks = 0
        if state == "completed":
            self.progress = None


class Life:
    """The jobs, and what open transactions have done to them."""

    def __init__(self, letters):
        self.jobs = {}
        self.letters = letters  # queues that keep dead letters
        self.receipts = []  # all that were ever handed out
        self.frames = {}  # session -> its savepoints: {job_id: the job before, None if new}
        self.totals = {}  # queue -> state -> how many reached it, by committed transactions
        self.pending = {}  # session -> the same for each savepoint

    # Transactions

    def begin(self, session):
        self.frames[session], self.pending[session] = [{}], [[]]

    def savepoint(self, session):
        self.frames[session].append({})
        self.pending[session].append([])

    def release(self, session):
        """The innermost savepoint becomes part of what is around it."""
        inner, outer = self.frames[session].pop(), self.frames[session][-1]
        for job_id, before in inner.items():
            outer.setdefault(job_id, before)
        ended = self.pending[session].pop()
        self.pending[session][-1] += ended

    def undo(self, session):
        """Back to the innermost savepoint, or to the beginning."""
        for job_id, before in self.frames[session][-1].items():
            after = self.jobs[job_id]
            if before is None:
                del self.jobs[job_id]
                continue
            if before.state == "available" and after.receipt != before.receipt:
                before.rollbacks += 1
            self.jobs[job_id] = before
        self.frames[session][-1].clear()
        self.pending[session][-1].clear()

    def rollback(self, session):
        while True:
            self.undo(session)
            if len(self.frames[session]) == 1:
                break
            self.frames[session].pop()
            self.pending[session].pop()
        del self.frames[session], self.pending[session]

    def commit(self, session):
        while len(self.frames[session]) > 1:
            self.release(session)
        del self.frames[session]
        for queue, state in self.pending.pop(session)[0]:
            self.count(queue, state)

    def count(self, queue, state):
        counts = self.totals.setdefault(queue, {})
        counts[state] = counts.get(state, 0) + 1

    def touch(self, session, job):
        if session in self.frames:
            self.frames[session][-1].setdefault(job.job_id, replace(job, errors=job.errors[:]))

    def add(self, session, job):
        self.jobs[job.job_id] = job
        if session in self.frames:
            self.frames[session][-1][job.job_id] = None

    def owner(self, job):
        """The session whose open transaction has touched the job."""
        for session, frames in self.frames.items():
            if any(job.job_id in frame for frame in frames):
                return session
        return None

    def is_new(self, job):
        """Whether the transaction that made it is still open."""
        return any(frame.get(job.job_id, job) is None
                   for frames in self.frames.values() for frame in frames)

    def seen(self, session, job_id):
        """The job as a session sees it."""
        job = self.jobs.get(job_id)
        owner = self.owner(job) if job else None
        if owner in (None, session):
            return job
        for frame in self.frames[owner]:
            if job_id in frame:
                return frame[job_id]
        return job

    # What holds what

    def holder(self, key):
        return next((job for job in self.jobs.values()
                     if job.key == key and job.state in HOLDING), None)

    def key_is_touched(self, key, but=None):
        """Whether somebody's open transaction may give the key away or take it."""
        touched = [self.owner(job) for job in self.jobs.values() if job.key == key]
        before = [frame[job_id] for frames in self.frames.values() for frame in frames
                  for job_id in frame if frame[job_id] is not None]
        return any(owner not in (None, but) for owner in touched) or any(
            job.key == key and self.owner(job) not in (None, but) for job in before)

    def claimable(self, queue):
        """The jobs that a claim may give, and those among them that it must not miss."""
        may = [job for job in self.jobs.values()
               if job.queue == queue and job.state == "available" and self.owner(job) is None]
        return may, [job for job in may if job.is_sure]

    def by_receipt(self, session, receipt):
        """The running job of a receipt, or None: it is stale for this session."""
        for job in self.jobs.values():
            if job.receipt == receipt and job.state == "running":
                return job
        return None

    # Lives

    def end(self, session, job, state, error=None):
        """The attempt ends, or the waiting job does."""
        self.touch(session, job)
        if error is not None:
            job.errors.append(error)
        job.letter = state == "failed" and job.queue in self.letters
        job.stop_running(state)
        job.soon = None
        if state in TERMINAL:
            if session in self.pending:
                self.pending[session][-1].append((job.queue, state))
            else:
                self.count(job.queue, state)

    def fail(self, session, job, error, terminal, at_once):
        if job.asked:
            state = "cancelled"
        elif terminal or job.attempt >= job.max_attempts:
            state = "failed"
        else:
            state = "available" if at_once else "retryable"
        self.end(session, job, state, error)
        if state == "available":
            job.soon = "retryable"
            return "retryable"
        return state

    def give_back(self, session, job, state, soon=None):
        """The attempt is over and was none."""
        if job.asked:
            return self.end(session, job, "cancelled")
        self.touch(session, job)
        job.stop_running(state)
        job.attempt -= 1
        job.soon = soon

    def claim(self, session, job, receipt, runtime):
        self.touch(session, job)
        job.state, job.receipt, job.soon = "running", receipt, None
        job.attempt += 1
        job.session = session if runtime else None
        self.receipts.append(receipt)
