"""Which part of a trace: knobs are fitted on first halves, second halves are for judging them."""

from __future__ import annotations

from enum import StrEnum


class Half(StrEnum):
    FIRST = "first"
    SECOND = "second"
    WHOLE = "whole"
