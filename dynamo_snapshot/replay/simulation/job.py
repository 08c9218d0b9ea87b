"""One request on its way through the simulation, and who is told how it goes."""

from __future__ import annotations

from typing import Protocol


class Job:
    """A request: what it asks for, and when it got what. Times are seconds since the trace began."""

    __slots__ = ("arrived_s", "finished_s", "first_token_s", "given", "prefilled", "prompt", "tokens")

    def __init__(self, arrived_s: float, prompt: int, tokens: int) -> None:
        self.arrived_s = arrived_s
        self.prompt = prompt
        """Tokens in, at least 1."""
        self.tokens = tokens
        """Tokens out, at least 1."""
        self.given = 0
        """Tokens given so far, as of the last pass boundary that mattered to this request."""
        self.prefilled = 0
        self.first_token_s: float | None = None
        self.finished_s: float | None = None

    @property
    def to_prefill(self) -> int:
        """Tokens to compute before the next one: the prompt, and what a preemption threw away."""
        return self.prompt + self.given

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between its tokens; None: it is not finished, or has one token."""
        if self.finished_s is None or self.first_token_s is None or self.tokens < 2:
            return None
        return (self.finished_s - self.first_token_s) / (self.tokens - 1)


class Listener(Protocol):
    """Is told of a request's two moments, when they come."""

    def first_token(self, job: Job) -> None: ...

    def finished(self, job: Job) -> None: ...
