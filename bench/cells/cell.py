"""What a cell is."""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    name: str
    what: str
    run: Callable  # with a measure.Round
    minutes: float | None = None  # of those bound by time, not by a number of jobs
    rounds: int = 3  # at most: a long one shows its spread in its own course
    settings: dict = field(default_factory=dict)
