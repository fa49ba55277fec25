"""Rows that get no example, and samples that are cut: counted, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING

from ..config import Train
from ..errors import UserError
from .example import Encoded
from .rows import Row

if TYPE_CHECKING:
    from ..tasks import Task

_SHARE = 0.1
"""Of samples that may be left out or lose some of their answer, unless the recipe says otherwise."""


class Cut(IntEnum):
    """What a sample lost to fit."""

    NOTHING = 0
    TEXT = 1
    ANSWER = 2
    """Some of what is supervised as an answer; perhaps also of its prompt."""


@dataclass
class LeftOut:
    """Which rows get no example, and which are cut."""

    bad_rows: str
    overlong: str | None
    max_length: int
    skipped: list[str] = field(default_factory=list)
    truncated: int = 0
    dropped: int = 0
    cut_answers: int = 0

    def bad(self, row: Row, reason: str) -> None:
        """Refuse or skip a row with nothing to supervise."""
        if self.bad_rows == "refuse":
            raise UserError(f"{row.where}: {reason}; leave the row out, or set data.bad_rows: skip")
        self.skipped.append(f"{row.where}: {reason}")

    def long(self, row: Row, cut: Cut = Cut.TEXT) -> bool:
        """Count a sample that is longer than allowed; whether it is left out.

        cut: what it loses if it is not.
        """
        if self.overlong == "refuse":
            raise UserError(
                f"{row.where}: this sample is longer than train.max_length = {self.max_length} tokens; raise it, leave "
                "the row out, or set train.overlong: drop"
            )
        self.dropped += self.overlong == "drop"
        self.truncated += self.overlong is None
        self.cut_answers += self.overlong is None and cut is Cut.ANSWER
        return self.overlong == "drop"


@dataclass
class Losses:
    """What the samples of one split or source have lost for their length. A chat's answers its encoder counts."""

    called: str
    """How messages call these rows, as `train` or `train (SOURCE)`."""
    samples: int = 0
    cut_answers: int = 0
    dropped: int = 0

    def add(self, encoded: Encoded) -> None:
        """Count a chunk."""
        self.samples += len(encoded.examples) + encoded.dropped
        self.cut_answers += encoded.cut_answers
        self.dropped += encoded.dropped

    def refuse(self, task: Task, train: Train) -> None:
        """Raise UserError if more was lost than `train.max_dropped` or `task.max_truncated` allows."""
        for lost, setting, allowed, what in (
            (self.dropped, "train.max_dropped", train.max_dropped, "are longer than"),
            (self.cut_answers, "task.max_truncated", task.max_truncated, "have an answer that is cut at"),
        ):
            share = _SHARE if allowed is None else allowed
            if lost > share * self.samples:
                raise UserError(
                    f"{self.called}: {lost:,} of {self.samples:,} samples {what} train.max_length = {train.max_length} "
                    f"tokens, more than {setting} ({share:g}) allows; raise one of the two"
                )

    def notes(self) -> Iterator[str]:
        """What there is to know before the first step, a sentence each."""
        if self.cut_answers:
            yield f"{self.called}: {self.cut_answers:,} of {self.samples:,} samples have an answer that is cut"
