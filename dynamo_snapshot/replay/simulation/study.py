"""The settings in which policies are compared on the published traces.

One model of engine serves all; its speed differs by trace, such that a peak uses most of 16 replicas. With four
static replicas 94 % (Azure code), 99 % (Azure conversation), 84 % (Mooncake conversation) and 93 % (Mooncake
synthetic) of the requests get their first token within 1.5 s. The objective for the time between tokens is
50 ms for an engine of the mocker's own speed, and in proportion for a slower one.
"""

from __future__ import annotations

import msgspec

from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.timing import EngineTiming

TTFT_OBJECTIVE_S = 1.5
ITL_OBJECTIVE_S = 0.05
"""At speed 1."""


class Study(msgspec.Struct, frozen=True, kw_only=True):
    """A trace, how it is split and what it runs on."""

    trace: str
    """Its short name."""
    file: str
    """As published."""
    split_s: float
    """Knobs are fitted on requests before it, and judged on the others."""
    setting: Setting


def _study(trace: str, file: str, split_s: float, speed: float) -> Study:
    setting = Setting(
        name=trace,
        engine=EngineTiming(speed=speed),
        min_replicas=1,
        max_replicas=16,
        initial_replicas=4,
        ttft_objective_s=TTFT_OBJECTIVE_S,
        itl_objective_s=ITL_OBJECTIVE_S / speed,
    )
    return Study(trace=trace, file=file, split_s=split_s, setting=setting)


STUDIES: tuple[Study, ...] = (
    _study("azure-code", "AzureLLMInferenceTrace_code.csv", 1718.0, 0.30),
    _study("azure-conv", "AzureLLMInferenceTrace_conv.csv", 1718.0, 0.12),
    _study("mooncake-conversation", "mooncake_conversation_trace.jsonl", 1718.0, 0.67),
    _study("mooncake-synthetic", "mooncake_synthetic_trace.jsonl", 511.0, 0.82),
)
"""The synthetic trace lasts 1022 s, the others about an hour."""


def study(name: str) -> Study | None:
    """The study of a trace by its short name, or by its file's name with or without what follows the first dot."""
    return next((one for one in STUDIES if name in (one.trace, one.file, one.file.partition(".")[0])), None)
