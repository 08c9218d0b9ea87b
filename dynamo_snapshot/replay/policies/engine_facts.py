"""What rivals are told of the engine and the traffic, as an operator who load-tests one replica knows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.timing import EngineTiming, PassTimes
from dynamo_snapshot.replay.trace import TraceRequest

LOAD = 0.7
"""Share of an engine's prefill rate up to which queues stay short."""


@dataclass(frozen=True)
class Traffic:
    """What requests are like on average; the defaults are the Azure 2023 code trace's."""

    input_tokens: float = 2048.0
    output_tokens: float = 28.0

    @classmethod
    def of(cls, requests: Iterable[TraceRequest]) -> Traffic:
        """The means of ``requests``; the defaults where there are none."""
        lengths = [(request.input_tokens, request.output_tokens) for request in requests]
        if not lengths:
            return cls()
        input_tokens, output_tokens = (sum(column) / len(lengths) for column in zip(*lengths, strict=True))
        return cls(max(1.0, input_tokens), max(1.0, output_tokens))


@dataclass(frozen=True)
class EngineFacts:
    """One replica, and the objectives it is to keep."""

    timing: EngineTiming
    ttft_s: float
    itl_s: float
    capacity: float
    """Requests in flight with which a replica still keeps the time to first token: the unit of ``0.5c``."""
    traffic: Traffic = Traffic()

    @classmethod
    def of(cls, setting: Setting, traffic: Traffic) -> EngineFacts:
        return cls(
            setting.engine,
            setting.ttft_objective_s,
            setting.itl_objective_s,
            capacity(setting.engine, traffic, setting.ttft_objective_s),
            traffic,
        )

    @property
    def kv_percent(self) -> float:
        """How much of the KV cache the capacity's contexts fill, 0 to 100."""
        context = self.traffic.input_tokens + self.traffic.output_tokens / 2
        return min(100.0, 100.0 * self.capacity * context / self.timing.kv_tokens)

    def pass_s(self, prefill_tokens: int, context_tokens: int) -> float:
        """Seconds of a forward pass that prefills so many tokens and decodes over such a context."""
        times = PassTimes(self.timing)
        prefill = times.prefill(prefill_tokens) if prefill_tokens else 0.0
        return prefill + (times.decode(context_tokens) if context_tokens else 0.0)


def capacity(timing: EngineTiming, traffic: Traffic, ttft_s: float) -> float:
    """Requests in flight at :data:`LOAD`, by Little's law, when each waits just the objective for its first token.

    A decode step then takes as much longer as prefill has of the engine's time.
    """
    times = PassTimes(timing)
    prefill_s = traffic.input_tokens * times.prefill(timing.max_batched_tokens) / timing.max_batched_tokens
    rate = LOAD / prefill_s
    decode_s = traffic.output_tokens * times.decode(0) / (1 - LOAD)
    fits = timing.kv_tokens / (traffic.input_tokens + traffic.output_tokens)
    return max(1.0, min(rate * (ttft_s + decode_s), fits, float(timing.max_requests)))
