"""The expected rows and batches of a ledger, in the simplest terms."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.experience import Tokens
from shared.reward import Lesson

NOTHING, R, C = Lesson(0), Lesson.REWARD, Lesson.COMMENT


@dataclass
class Row:
    """The expected state of a row."""

    conversation: str
    task: str | None
    version: int
    tokens: Tokens
    state: str = "RECORDED"
    reward: float | None = None
    batch: int | None = None
    consumed: int | None = None
    teaches: Lesson = NOTHING
    acts: Lesson = NOTHING
    taught: Lesson = NOTHING
    logged: float | None = None  # the last reward, whether or not it could act
    late: bool = False  # it could not act when it arrived, and has not acted since
    commented: bool = False  # whether or not the comment could act

    @property
    def given(self) -> Lesson:
        return self.taught | (self.acts if self.state == "LEASED" else NOTHING)

    def log(self, lesson: Lesson, reward: float | None) -> None:
        """Log a signal, whether or not it can act."""
        if lesson is R:
            self.logged, self.late = reward, bool(self.given & R)
        else:
            self.commented = True

    def may_act(self, lesson: Lesson) -> bool:
        """All comments are equal: a repeated one does not act again; while the first waits, it counts as that one."""
        if self.state == "DISCARDED" or lesson in self.given:
            return False
        return lesson is R or not self.commented or lesson in self.teaches

    def hear(self, lesson: Lesson) -> None:
        """The lesson acts. So does a reward that arrived while a lease, since given back, held the row."""
        if self.logged is not None and not self.given & R:
            self.reward, self.late = self.logged, False
            lesson |= R
        self.teaches |= lesson & ~self.taught


@dataclass
class Batch:
    owner: str
    names: list[str] = field(default_factory=list)
    expired: bool = False
