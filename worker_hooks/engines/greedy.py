"""The self-test of a language model: greedy tokens to a fixed prompt, the same after a restore as at the capture."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from worker_hooks.reasons import HookError, HookReason

PROMPT = tuple(range(100, 164))
"""As token ids: any model has them."""
ANSWER_TOKENS = 8


class GreedyAnswer:
    """What the engine itself said before its capture, and whether it still does.

    Args:
        evidence: the worker's; ``answer`` is the last one given.
    """

    def __init__(self, evidence: MutableMapping[str, str]) -> None:
        self._evidence = evidence
        self._expected: list[int] | None = None

    @property
    def recorded(self) -> bool:
        return self._expected is not None

    def record(self, tokens: Sequence[int]) -> None:
        """Keeps ``tokens`` as the right answer."""
        self._expected = self._note(tokens)

    def check(self, tokens: Sequence[int]) -> None:
        """Raises ``self_test_failed`` where ``tokens`` are not those recorded; any are right where none were."""
        answer = self._note(tokens)
        if self._expected is not None and answer != self._expected:
            raise HookError(
                HookReason.SELF_TEST_FAILED, f"the prompt gave {answer} instead of {self._expected} as at capture"
            )

    def _note(self, tokens: Sequence[int]) -> list[int]:
        if not tokens:
            raise HookError(HookReason.SELF_TEST_FAILED, "the engine had no token for the prompt")
        self._evidence["answer"] = " ".join(map(str, tokens))
        return list(tokens)
