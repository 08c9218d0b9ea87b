"""Engines that cannot hold a request are refused, with the least that would do: exactly as the simulation runs them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.fit import require_fit
from dynamo_snapshot.replay.comparison.halves import Half
from dynamo_snapshot.replay.comparison.runs import perform, runs
from dynamo_snapshot.replay.comparison.settings import changed, setting_of
from dynamo_snapshot.replay.comparison.sources import Source, named_sources, part
from dynamo_snapshot.replay.simulation.engine import Engine
from dynamo_snapshot.replay.simulation.job import Job
from dynamo_snapshot.replay.simulation.setting import Setting
from dynamo_snapshot.replay.simulation.timing import EngineTiming

BUNDLED = named_sources(())
LARGEST = 7581
"""Tokens of the bundled trace's largest request, in and out."""


class Nobody:
    def first_token(self, job: Job) -> None: ...

    def finished(self, job: Job) -> None: ...


def with_kv(kv_tokens: int) -> dict[str, Setting]:
    return {source.name: changed(setting_of(source), [f"engine.kv_tokens={kv_tokens}"]) for source in BUNDLED}


def mooncake(path: Path, *requests: tuple[int, int, int]) -> Source:
    """A trace of (seconds, tokens in, tokens out)."""
    lines = [
        f'{{"timestamp": {1000 * second}, "input_length": {tokens_in}, "output_length": {tokens_out}}}\n'
        for second, tokens_in, tokens_out in requests
    ]
    path.write_text("".join(lines))
    return Source(path.stem, str(path))


def refusal(source: Source, kv_tokens: int, half: Half = Half.WHOLE) -> SnapshotError | None:
    try:
        require_fit([source], half, {source.name: Setting(engine=EngineTiming(kv_tokens=kv_tokens))})
    except SnapshotError as error:
        return error
    return None


def most_needed(tokens_in: int, tokens_out: int, kv_tokens: int) -> int:
    """KV tokens that the largest pass of an engine needs which runs one request."""
    engine = Engine(EngineTiming(kv_tokens=kv_tokens, max_requests=4, max_batched_tokens=16), Nobody())
    engine.start(0.0)
    engine.submit(Job(0.0, tokens_in, tokens_out), 0.0)
    most = 0
    while engine.ends_at < math.inf:
        engine.proceed()
        # The last of a stretch's passes: each gives every request one token more.
        decoding = len(engine.batch.decoding)
        most = max(most, engine.batch.context + decoding * max(1, engine.stretch))
    return most


@pytest.mark.parametrize(("tokens_in", "tokens_out"), [(1, 2), (40, 2), (40, 60), (500, 7)])
def test_what_is_let_through_never_needs_more_than_the_cache_has_and_one_token_less_would(
    tmp_path: Path, tokens_in: int, tokens_out: int
) -> None:
    source = mooncake(tmp_path / "trace.jsonl", (0, tokens_in, tokens_out))
    least = tokens_in + tokens_out
    assert refusal(source, least) is None
    assert most_needed(tokens_in, tokens_out, least) == least
    assert refusal(source, least - 1) is not None
    assert most_needed(tokens_in, tokens_out, least - 1) > least - 1


def test_a_request_of_no_tokens_is_simulated_as_one_of_one_each_way(tmp_path: Path) -> None:
    source = mooncake(tmp_path / "trace.jsonl", (0, 0, 0))
    assert refusal(source, 2) is None
    assert refusal(source, 1) is not None


def test_how_many_do_not_fit_the_largest_and_the_remedy_are_said() -> None:
    with pytest.raises(SnapshotError) as error:
        require_fit(BUNDLED, Half.WHOLE, with_kv(300))
    assert error.value.reason is Reason.CONFIGURATION_INVALID
    sizes = [(one.input_tokens, one.output_tokens) for one in part(BUNDLED[0], Half.WHOLE).played]
    count = sum(sum(size) > 300 for size in sizes)
    tokens_in, tokens_out = max(sizes, key=sum)
    assert tokens_in + tokens_out == LARGEST
    assert error.value.message == (
        f"azure-code-excerpt: {count} of {len(sizes)} requests do not fit into a KV cache of 300 tokens; "
        f"the largest has {tokens_in} in and {tokens_out} out"
    )
    assert f"engine.kv_tokens={LARGEST} or more" in error.value.remedy


def test_the_remedy_is_one_and_runs_as_time_does() -> None:
    settings = with_kv(LARGEST)
    require_fit(BUNDLED, Half.WHOLE, settings)
    planned = runs(BUNDLED, Half.WHOLE, ["static(4)", "snapshot"], ["restore-2s"], 1, settings)
    for row in (perform(run).row for run in planned):
        assert row.ttft_p50_s is not None
        assert row.ttft_p95_s is not None
        assert 0 < row.ttft_p50_s <= row.ttft_p95_s
        assert row.gpu_hours > 0
    with pytest.raises(SnapshotError, match="1 of 1013 requests does not fit into a KV cache of 7580 tokens"):
        require_fit(BUNDLED, Half.WHOLE, with_kv(LARGEST - 1))


def test_of_several_traces_the_remedy_holds_for_all(tmp_path: Path) -> None:
    sources = [
        mooncake(tmp_path / f"{name}.jsonl", (0, 10, 10), (9, tokens, 1))
        for name, tokens in (("a", 500), ("b", 900), ("c", 20))
    ]
    settings = {source.name: Setting(engine=EngineTiming(kv_tokens=300)) for source in sources}
    with pytest.raises(SnapshotError, match=r"^a: 1 of 2 requests does .*; b: 1 of 2 requests does") as error:
        require_fit(sources, Half.WHOLE, settings)
    assert "c:" not in error.value.message
    assert "engine.kv_tokens=901" in error.value.remedy


def test_what_is_not_played_is_not_asked_for(tmp_path: Path) -> None:
    late = mooncake(tmp_path / "late.jsonl", (0, 10, 10), (90, 500, 10), (100, 10, 10))
    assert refusal(late, 300, Half.FIRST) is None
    assert refusal(late, 300, Half.SECOND) is not None
    early = mooncake(tmp_path / "early.jsonl", (0, 500, 10), (90, 10, 10), (100, 10, 10))
    assert refusal(early, 300, Half.SECOND) is not None, "what comes before a second half is played"


def test_the_settings_that_are_measured_hold_every_request() -> None:
    require_fit(BUNDLED, Half.WHOLE, {source.name: setting_of(source) for source in BUNDLED})
