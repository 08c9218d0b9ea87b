"""Traces: both formats, wrong lines by their number, windows and speeds."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.trace import TraceRequest, bundled_trace, faster, read_trace, scaled, window

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:18:03.9799601,110,27
"""


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_an_azure_trace_keeps_its_seven_decimals(tmp_path: Path) -> None:
    first, second, third = read_trace(written(tmp_path, "t.csv", AZURE))
    assert first == TraceRequest(0.0, 4808, 10)
    assert second.offset_s == pytest.approx(0.052, abs=1e-7)
    assert third.offset_s == pytest.approx(60.0000001, abs=2e-8)


def test_offsets_can_count_from_a_given_moment(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, "t.csv", AZURE), origin="2023-11-16 18:17:00.0000000")
    assert requests[0].offset_s == pytest.approx(3.97996)


def test_a_mooncake_trace_is_in_milliseconds_and_sorted(tmp_path: Path) -> None:
    text = '{"timestamp": 3000, "input_length": 7, "output_length": 5, "hash_ids": [1]}\n\n'
    text += '{"timestamp": 1500, "input_length": 1, "output_length": 2}\n'
    assert read_trace(written(tmp_path, "t.jsonl", text)) == (TraceRequest(0.0, 1, 2), TraceRequest(1.5, 7, 5))


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.csv", "when,in,out\n1,2,3\n", "a.csv:1: expected the columns"),
        ("b.csv", AZURE + "2023-11-16 18:18:04.0,many,3\n", "b.csv:5: .*many"),
        ("c.csv", AZURE + "yesterday,1,3\n", "c.csv:5: .*yesterday"),
        ("d.csv", AZURE + "2023-11-16 18:18:04.0,1\n", "d.csv:5:"),
        ("e.csv", AZURE + "2023-11-16 18:18:04.0,-1,1\n", "e.csv:5: .*-1 is not a number of tokens"),
        ("f.csv", "", "f.csv:1: expected the columns"),
        ("g.csv", AZURE.splitlines()[0] + "\n", "g.csv: holds no request"),
        (
            "h.jsonl",
            '{"timestamp": 0, "input_length": 1, "output_length": 1}\n{"timestamp": 1}\n',
            "h.jsonl:2: .*input",
        ),
        ("i.jsonl", "not json\n", "i.jsonl:1:"),
        ("j.jsonl", "[1]\n", "j.jsonl:1:"),
        ("k.jsonl", '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "k.jsonl:1: .*not a time"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, name: str, text: str, where: str) -> None:
    with pytest.raises(SnapshotError, match=where) as refused:
        read_trace(written(tmp_path, name, text))
    assert refused.value.reason is Reason.CONFIGURATION_INVALID
    assert refused.value.remedy


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"nowhere\.csv: cannot be read"):
        read_trace(tmp_path / "nowhere.csv")


def test_the_bundled_trace_is_the_spike_after_a_silence_with_its_attribution() -> None:
    requests = bundled_trace()
    assert len(requests) == 1013
    assert requests[0] == TraceRequest(pytest.approx(13.0558, abs=1e-4), 1338, 8)
    assert requests[-1].offset_s < 285
    assert sum(request.output_tokens for request in requests) == 24865
    notice = (resources.files("dynamo_snapshot.replay") / "traces" / "ATTRIBUTION.md").read_text()
    for named in ("CC-BY-4.0", "Azure/AzurePublicDataset", "Splitwise"):
        assert named in notice


def test_window_speed_and_scale() -> None:
    requests = tuple(TraceRequest(float(second), 100, 10) for second in range(10))
    assert [request.offset_s for request in window(requests, 3, 6)] == [0, 1, 2]
    assert [request.offset_s for request in faster(requests[:3], 2)] == [0, 0.5, 1]
    assert scaled(requests[:1], 0.25, 0.001) == (TraceRequest(0.0, 25, 1),)
    with pytest.raises(ValueError, match="speed must be a positive number"):
        faster(requests, 0)
