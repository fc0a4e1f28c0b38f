"""Every function of the schema with random and extreme arguments.

Whatever it is given, a function answers or fails with a code of the contract: never
XX000, never a crash, and the invariants hold. The functions and the types of their
arguments are read from the catalog, so that no new one is forgotten.

AWA_FUZZ_SECONDS says how long (20), AWA_FUZZ_SEED repeats a run; `make fuzz` is the
long form.
"""

import os
import random
import re
import threading
import time

import psycopg
import pytest

from harness import Database, wait_until

SECONDS = float(os.environ.get("AWA_FUZZ_SECONDS", "20"))
SEED = int(os.environ.get("AWA_FUZZ_SEED", str(time.time_ns() % 1_000_000)))
ENOUGH = 10  # findings
SESSIONS = int(os.environ.get("AWA_FUZZ_SESSIONS", "3"))

# What the contract lists, and what the settings and transactions of this test can bring.
CONTRACT = {
    "AW001", "AW002", "AW003", "AW004", "0A000", "55000", "P0002", "22023", "23514", "23505",
    "42501", "25006",
    "25001",  # wait_for_jobs in a transaction that has written
    "40P01", "55P03", "57014",  # deadlock, lock_timeout, statement_timeout
}
# To read an argument may also fail; the call itself then is not made.
CONVERSION = re.compile("22...|54...|42846")
# Functions that name roles say of an unknown one what Postgres says.
ALSO = {"grant_access": {"42704"}, "revoke_access": {"42704"}}

STATES = ["scheduled", "available", "running", "completed", "retryable", "failed", "cancelled",
          "waiting_external"]
QUEUES = ["default", "a", "b", "Ünï cödé", 'quo"ted\'; --', "x" * 200, "*", "a*"]
TEXTS = [
    "", " ", "k", "%s", "\\", "'", '"', "a\nb", "\x01", "\x7f", "\u202e", "é" * 200, "x" * 201,
    "😀" * 50, "x" * 100_000, "NULL", "{}", "[", "awa.jobs", "pg_temp", "1", "-1", "0",
]
JSONS = [
    "{}", "[]", "null", "true", '""', "0", "-0", "1e400", "1" * 1000, "0." + "0" * 500 + "1",
    "[" * 5000 + "]" * 5000, "[" * 100_000, '{"a":' * 3000 + "1" + "}" * 3000,
    '"\\u0000"', '"\\ud800"', '{"a": 1, "a": 2}', '{"": null}', "[null]", "[[]]", "[{}]",
    '"' + "x" * 300_000 + '"', "{", "nul",
]
INTERVALS = [
    "0", "1 s", "50 ms", "1 microsecond", "-1 s", "1 month", "178000000 years",
    "-178000000 years", "2147483647 days", "1 month -30 days", "9223372036854775807 us",
    "-9223372036854775808 us", "infinity", "P1Y", "25:61", "1 day", "2147483647 months",
]
TIMES = [
    "now", "infinity", "-infinity", "epoch", "4713-01-01 BC", "294276-12-31 23:59:59.999999",
    "294277-01-01", "2000-02-30", "tomorrow", "yesterday", "2025-01-01 00:00:00+15:59",
    "0001-01-01 00:00:00 BC",
]
INTEGERS = ["0", "1", "-1", "2", "3", "4", "5", "25", "1000", "1001", "10000", "10001", "32767",
            "32768", "-32768", "2147483647", "-2147483648", "2147483648", "9223372036854775807",
            "-9223372036854775808", "9223372036854775808", "1.5", "x", ""]
BOOLEANS = ["true", "false", "t", "maybe"]
UUIDS = ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff", "x"]
BYTES = ["\\x", "\\x00", "\\xff" + "00" * 3000, "abc", "\\xzz"]
BITS = ["11111111", "00000000", "1", "", "111111111", "10000001", "2"]
NAMES = ["postgres", "fuzz_a", "fuzz_b", "public", "nobody knows", "x" * 100, ""]

SETTINGS = {
    "priority": INTEGERS, "max_attempts": INTEGERS, "attempt_deadline": INTERVALS,
    "priority_aging": INTERVALS, "enqueue_shards": INTEGERS, "dlq_enabled": BOOLEANS,
    "failed_retention": ["-1", *INTERVALS], "max_depth": INTEGERS, "ordering": ["serial", "lane", "strict", *TEXTS],
    "backoff": ['{"base": "1 s"}', '{"factor": 1e308}', '{"jitter": -1}', '{"max": "0"}', "3"],
}
OPTIONS = {
    "unique_states": ['["running"]', '["no state"]', "[]", "[1]", "{}"],
    "unique_by": ['["queue"]', '["args", "queue"]', '["x"]', "1"],
    "unique_period": INTERVALS, "on_conflict": ["return", "error", "replace", "debounce", "x"],
    "throttle": INTERVALS, "ordering_key": TEXTS, "concurrency_key": TEXTS,
    "deadline": INTERVALS, "expires_at": TIMES, "priority": INTEGERS, "queue": QUEUES,
    "run_at": TIMES, "namespace": TEXTS, "no such option": ["1"],
}
JOB = {
    "kind": ["k", "k", "k", *TEXTS], "args": JSONS, "queue": QUEUES, "priority": ["1", *INTEGERS],
    "run_at": TIMES, "max_attempts": ["3", *INTEGERS], "tags": ['["a"]', "[]", "[null]", "1"],
    "metadata": JSONS, "unique_key": TEXTS,
}
FILTER = {
    "queue": QUEUES, "kind": ["k", *TEXTS], "tag": TEXTS, "state": STATES, "ids": ["[1]", "[]", "[1e9]"],
    "before": TIMES, "after": TIMES, "allow_all": ["true", "false", "1"],
}
# By name of the argument, before its type is asked.
TEXTS_BY_NAME = {
    "queue": QUEUES, "queues": QUEUES, "kind": ["k", "owner", "deadline", "callback"],
    "kinds": ["k"], "state": STATES, "liveness": ["session", "heartbeat", "x"],
    "profile": ["producer", "worker", "operator", "reader", "x"],
    "scope": ["maintenance.prune", "x"], "mode": ["drain", "x"], "unique_key": ["u", "v"],
    "p_queue": QUEUES, "p_kind": ["k"], "role_name": NAMES,
}
OBJECTS_BY_NAME = {"opts": OPTIONS, "settings": SETTINGS, "filter": FILTER}
BY_TYPE = {
    "text": TEXTS, "name": NAMES, "jsonb": JSONS, "interval": INTERVALS,
    "timestamp with time zone": TIMES, "boolean": BOOLEANS, "uuid": UUIDS, "bytea": BYTES,
    "awa.job_state": [*STATES, "lost", ""], "bigint": INTEGERS, "integer": INTEGERS,
    "smallint": INTEGERS, "bit": BITS, "double precision": ["NaN", "-Infinity", "1e308", "0"],
}
# Each call costs much, or makes all others fail for a moment.
RARE = {"rebuild": 0.01, "check": 0.05, "maintain": 0.1, "drain_queue": 0.2, "discard_failed": 0.2}
SAID = ["SET TimeZone = 'Pacific/Chatham'", "SET DateStyle = 'German'", "RESET TimeZone",
        "RESET DateStyle", "SET client_encoding = 'LATIN1'", "SET client_encoding = 'EUC_JP'",
        "SET client_encoding = 'SQL_ASCII'", "SET client_encoding = 'UTF8'",
        "SET default_transaction_isolation = 'serializable'",
        "SET default_transaction_isolation = 'repeatable read'",
        "RESET default_transaction_isolation", "SET search_path = ''", "RESET search_path",
        "SET default_transaction_read_only = on", "RESET default_transaction_read_only",
        "RESET default_transaction_read_only", "RESET ALL", "DISCARD ALL", "DISCARD ALL"]


class Routine:
    def __init__(self, name, procedure, names, types):
        self.name, self.procedure = name, procedure
        self.names, self.types = names, types


def routines(conn):
    """All of the schema but trigger functions, which only a trigger can call."""
    found = conn.rows("""
        SELECT proname, prokind = 'p',
               coalesce(proargnames[:cardinality(proargtypes::oid[])], '{}'),
               proargtypes::oid[]::regtype[]::text[]
        FROM pg_proc WHERE pronamespace = 'awa'::regnamespace AND prorettype <> 'trigger'::regtype
        ORDER BY proname""")
    return [Routine(*row) for row in found]


class Pool:
    """What calls returned: receipts, jobs, callbacks, runtimes and halts that exist."""

    def __init__(self):
        self.numbers, self.uuids = ["1"], ["00000000-0000-0000-0000-000000000001"]

    def note(self, result):
        """As the server sent it: the driver cannot read all that comes."""
        for row in range(min(result.ntuples, 20)):
            for column in range(min(result.nfields, 2)):
                value = (result.get_value(row, column) or b"").decode("latin1")
                if re.fullmatch(r"-?\d+", value):
                    self._keep(self.numbers, value)
                elif re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", value):
                    self._keep(self.uuids, value)

    @staticmethod
    def _keep(known, value):
        known.append(value)
        del known[:-200]


class Values:
    def __init__(self, dice, pool):
        self.dice, self.pool = dice, pool

    def object(self, known):
        dice = self.dice
        parts = []
        for key in dice.sample(sorted(known), dice.choice([0, 1, 1, 2, 3])):
            value = dice.choice(known[key])
            if dice.random() < 0.5 or not re.match(r'[\[{"\d]|true|false|null', value):
                value = quoted(value)
            parts.append(f"{quoted(key)}: {value}")
        return "{" + ", ".join(parts) + "}"

    def job(self):
        job = self.object(JOB)
        return job if self.dice.random() < 0.3 else job.replace("{", '{"kind": "k", ', 1).replace(", }", "}")

    def one(self, name, of_type):
        """A value as text; None is NULL."""
        dice = self.dice
        luck = dice.random()
        if luck < 0.07:
            return None
        if of_type.endswith("[]"):
            return self.array(name, of_type[:-2])
        if of_type == "jsonb":
            if name in OBJECTS_BY_NAME and luck < 0.8:
                return self.object(OBJECTS_BY_NAME[name])
            if name == "jobs" and luck < 0.8:
                return "[" + ", ".join(self.job() for _ in range(dice.choice([0, 1, 1, 3, 30]))) + "]"
        elif name in TEXTS_BY_NAME and luck < 0.85:
            return dice.choice(TEXTS_BY_NAME[name])
        elif of_type == "uuid" and luck < 0.7:
            return dice.choice(self.pool.uuids)
        elif of_type == "bigint" and luck < 0.75:
            return dice.choice(self.pool.numbers)
        elif of_type == "integer" and luck < 0.4:
            return str(dice.randrange(5))
        elif of_type == "interval" and luck < 0.4:
            return dice.choice(["0", "10 ms", "1 s", "1 hour"])
        return dice.choice(BY_TYPE[of_type])

    def array(self, name, of_type):
        dice = self.dice
        if dice.random() < 0.03:
            size = dice.choice([10_000, 100_001])
            value = self.one(name, of_type)
            return "{" + ",".join([element(value)] * (size if len(value or "") < 20 else 100)) + "}"
        size = dice.choice([0, 1, 1, 1, 2, 3, 20, 1000])
        if size == 1000:
            few = [element(self.one(name, of_type)) for _ in range(3)]
            few = [value for value in few if len(value) < 1000] or ["NULL"]
            parts = [dice.choice(few) for _ in range(size)]
        else:
            parts = [element(self.one(name, of_type)) for _ in range(size)]
        if dice.random() < 0.03 and parts:
            return "{{" + ",".join(parts) + "}}"
        if dice.random() < 0.02 and parts:
            return f"[-5:{len(parts) - 6}]={{{','.join(parts)}}}"
        return "{" + ",".join(parts) + "}"


def quoted(text):
    """A JSON string, control characters and all."""
    escape = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\x01": "\\u0001"}
    return '"' + "".join(escape.get(c, c) for c in text) + '"'


def element(value):
    """An element of an array's text form."""
    if value is None:
        return "NULL"
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


class Fuzzer:
    """One session; it opens a new one where a fault of the arguments breaks its own."""

    def __init__(self, database, number, known, report):
        self.database, self.known, self.report = database, known, report
        self.dice = random.Random(f"{SEED}/{number}")
        self.pool = Pool()
        self.values = Values(self.dice, self.pool)
        self.calls, self.codes = 0, {}
        self.conn = None
        self.in_transaction = False

    def run(self, until):
        while time.monotonic() < until and len(self.report) < ENOUGH:
            if self.conn is None or self.conn.closed:
                # Neither settings nor prepared statements would outlive DISCARD ALL.
                self.conn = self.database.server.connect(
                    self.database.name, prepare_threshold=None,
                    options="-c statement_timeout=3s -c lock_timeout=500ms"
                            " -c awa.claim_wait_max=20ms")
                self.in_transaction = False
            self.step()
        if self.conn and not self.conn.closed and self.in_transaction:
            self.in_transaction = False
            self.say("ROLLBACK")

    def step(self):
        dice = self.dice
        luck = dice.random()
        if luck < 0.03:
            return self.say(dice.choice(SAID))
        if luck > 0.97:
            return self.say("RESET default_transaction_read_only")
        if self.in_transaction:
            if luck < 0.15:
                self.in_transaction = False
                return self.say(dice.choice(["COMMIT", "ROLLBACK"]))
            if luck < 0.2:
                return self.say("SAVEPOINT s")
            if luck < 0.25:
                return self.say("ROLLBACK TO s")
        elif luck < 0.08:
            self.in_transaction = True
            return self.say(dice.choice(["BEGIN", "BEGIN", "BEGIN READ ONLY",
                                         "BEGIN ISOLATION LEVEL SERIALIZABLE"]))
        routine = dice.choice(self.known)
        if dice.random() > RARE.get(routine.name, 1):
            return None
        return self.call(routine)

    def say(self, statement):
        try:
            self.conn.execute(statement)
        except psycopg.Error:
            if not self.conn.closed:
                self.recover()

    def recover(self):
        """Out of an aborted transaction, or back to its savepoint."""
        if self.in_transaction:
            try:
                if self.dice.random() < 0.5:
                    return self.conn.execute("ROLLBACK TO s")
            except psycopg.Error:
                pass
            self.in_transaction = False
            self.conn.execute("ROLLBACK")
        return None

    def call(self, routine):
        given = [self.values.one(*both) for both in zip(routine.names, routine.types)]
        casts = [f"%s::text::{type}" for type in routine.types]
        if not self.convert(casts, given):
            return
        call = f"awa.{routine.name}({', '.join(casts)})"
        call = f"CALL {call}" if routine.procedure else f"SELECT * FROM {call}"
        self.calls += 1
        code = "ok"
        try:
            self.pool.note(self.conn.execute(call, given).pgresult)
        except psycopg.Error as error:
            code = error.diag.sqlstate
            self.judge(routine, given, code, error)
        self.codes[code] = self.codes.get(code, 0) + 1

    def convert(self, casts, given):
        """Whether the arguments can be read at all."""
        if not casts:
            return True
        try:
            self.conn.execute(f"SELECT {', '.join(casts)}", given)
            return True
        except (UnicodeError, psycopg.Error) as error:
            code = getattr(getattr(error, "diag", None), "sqlstate", None)
            # None: the driver could not write or read it.
            if code is None or CONVERSION.fullmatch(code) or code in ("57014", "55P03"):
                if not self.conn.closed:
                    self.recover()
            else:
                self.report.append(f"conversion: {code} {error} of {shown(given)}")
            return False

    def judge(self, routine, given, code, error):
        if code == "22P05" and "has no equivalent" in str(error):
            pass  # on its way to a client that chose a smaller encoding
        elif code not in CONTRACT | ALSO.get(routine.name, set()):
            self.report.append(f"{routine.name}({shown(given)}): {code} {error}")
        if not self.conn.closed:
            self.recover()


def shown(given):
    return ", ".join(repr(v if v is None or len(v) < 300 else v[:300] + "...") for v in given)


def test_any_argument_of_any_function(new_server):
    print("seed", SEED)
    server = new_server({"log_min_messages": "warning", "log_statement": "none"})
    database = Database(server)
    database.execute("CREATE ROLE fuzz_a LOGIN")
    database.execute("CREATE ROLE fuzz_b LOGIN")
    known = routines(database.conn)
    untold = {t.removesuffix("[]") for r in known for t in r.types} - BY_TYPE.keys()
    assert not untold, f"arguments of types this test has no values for: {untold}"
    report = []
    pid = server.process.pid
    fuzzers = [Fuzzer(database, number, known, report) for number in range(SESSIONS)]
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and len(report) < ENOUGH:
        until = min(end, time.monotonic() + 10)
        threads = [threading.Thread(target=guarded, args=(f, until, report)) for f in fuzzers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), f"a session does not come back: {active(server)}"
        assert server.process.poll() is None and server.process.pid == pid
        database.wait_served()
        database.check()
    calls = sum(f.calls for f in fuzzers)
    codes = {}
    for fuzzer in fuzzers:
        for code, count in fuzzer.codes.items():
            codes[code] = codes.get(code, 0) + count
    print(calls, "calls:", dict(sorted(codes.items(), key=lambda item: -item[1])))
    assert not report, "\n".join(report)
    for word in ("PANIC", "was terminated by signal", "panicked", "XX000", "TRAP:"):
        assert word not in server.log(), f"{word} in the log:\n{server.log()[-4000:]}"
    assert calls > 5 * SECONDS, "too few calls to say anything"
    assert codes.get("ok", 0) > calls / 10, "hardly any call had an effect"
    wait_until(lambda: not database.rows("SELECT FROM pg_prepared_xacts"))
    database.close_sessions()


def active(server):
    with server.connect() as conn:
        return conn.rows("SELECT pid, state, wait_event, left(query, 500) FROM pg_stat_activity"
                         " WHERE state <> 'idle'")


def guarded(fuzzer, until, report):
    try:
        fuzzer.run(until)
    except BaseException as error:
        report.append(f"the session ended with {error!r}")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_databases_of_other_encodings(new_server, encoding):
    """Text of any bytes: it is kept, or refused with a code, and comes back as it was."""
    server = new_server()
    with server.connect() as conn:
        conn.execute(f"CREATE DATABASE odd TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
    with server.connect("odd") as conn:
        conn.execute("CREATE EXTENSION awa")
        conn.execute("SET client_encoding = 'SQL_ASCII'")
        for number, text in enumerate(("\\xe9", "\\xff\\xfe", "\\xc3")):
            try:
                job = conn.value(f"SELECT awa.insert_job(E'k{text}', queue => E'q{text}',"
                                 f" tags => ARRAY[E't{text}'], unique_key => E'u{text}')")
            except psycopg.Error as error:
                assert error.diag.sqlstate in CONTRACT | {"22021"}, error
                continue
            wait_until(lambda: claimable(conn), 10)
            same = conn.value(f"SELECT kind = E'k{text}' AND queue = E'q{text}' AND"
                              f" tags = ARRAY[E't{text}'] FROM awa.get_job(%s)", job)
            assert same, f"text {number} came back changed"
            receipt = conn.value(f"SELECT receipt FROM awa.claim(E'q{text}')")
            conn.execute(f"SELECT awa.fail(%s, E'e{text}')", (receipt,))
        assert conn.value("SELECT bool_and(ok) FROM awa.check()")


def claimable(conn):
    try:
        conn.execute("SELECT FROM awa.claim('default', 0)")
        return True
    except psycopg.Error as error:
        assert error.diag.sqlstate == "AW003"
        return False
