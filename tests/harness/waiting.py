"""Waiting for a condition, never for a time."""

import time


def wait_until(predicate, timeout=10.0, what=None, every=0.005):
    """Polls until `predicate()` is true and returns its value.

    `what` may be a text or a function that describes the state found last.
    """
    end = time.monotonic() + timeout
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > end:
            found = what() if callable(what) else what
            raise AssertionError(f"not within {timeout:g} s: {found or predicate}")
        time.sleep(every)
        every = min(every * 1.5, 0.1)
