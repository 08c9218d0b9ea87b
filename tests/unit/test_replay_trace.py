"""Traces: every format, wrong lines by their number, windows and speeds."""

from __future__ import annotations

import gzip
import json
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


def test_an_azure_trace_of_2024_has_a_zone(tmp_path: Path) -> None:
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
    text += "2024-05-10 00:00:01+00:00,2399,6\n"
    first, second = read_trace(written(tmp_path, "t.csv", text))
    assert (first.input_tokens, second.offset_s) == (2162, pytest.approx(0.99007))


BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.5,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,417,0,417,API log
"""


def test_a_burstgpt_trace_is_in_seconds_without_its_failed_requests(tmp_path: Path) -> None:
    requests = read_trace(written(tmp_path, "t.csv", BURST))
    assert requests == (TraceRequest(0.0, 472, 18), TraceRequest(40.5, 1087, 230))


def test_burstgpt_columns_are_found_by_name(tmp_path: Path) -> None:
    text = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    text += "7,abc,1.5,GPT-4,10,3,13,API log\n"
    assert read_trace(written(tmp_path, "t.csv", text)) == (TraceRequest(0.0, 10, 3),)


def dynamo_record(received_ms: float | None, tokens_in: int, tokens_out: int, event: str = "request_end") -> str:
    request = {"request_id": "r", "output_tokens": tokens_out, "replay": {"input_length": tokens_in}}
    if received_ms is not None:
        request["request_received_ms"] = received_ms
    return json.dumps(
        {
            "schema": "dynamo.request.trace.v1",
            "event_type": event,
            "event_time_unix_ms": 1_760_000_009_000,
            "request": request,
        }
    )


def test_a_dynamo_request_trace_counts_from_when_requests_were_received(tmp_path: Path) -> None:
    text = "\n".join(
        (
            dynamo_record(1_760_000_002_500, 70, 9),
            dynamo_record(1_760_000_001_000, 50, 4),
            dynamo_record(1_760_000_000_000, 1, 1, event="tool"),
            json.dumps({"timestamp": 3, "event": json.loads(dynamo_record(None, 30, 2))}),
        )
    )
    requests = read_trace(written(tmp_path, "t.jsonl", text))
    assert requests == (TraceRequest(0.0, 50, 4), TraceRequest(1.5, 70, 9), TraceRequest(8.0, 30, 2))


def test_the_segments_that_dynamo_writes_are_one_trace(tmp_path: Path) -> None:
    for number, received_ms in enumerate((4000, 1000)):
        packed = gzip.compress(dynamo_record(received_ms, 5, 5).encode())
        (tmp_path / f"trace.{number:06}.jsonl.gz").write_bytes(packed)
    (tmp_path / "notes.txt").write_text("not a segment")
    assert [request.offset_s for request in read_trace(tmp_path)] == [0.0, 3.0]


@pytest.mark.parametrize(("name", "text"), [("t.csv", AZURE), ("b.csv", BURST), ("d.jsonl", dynamo_record(1, 2, 3))])
def test_every_format_may_be_packed(tmp_path: Path, name: str, text: str) -> None:
    plain = read_trace(written(tmp_path, name, text))
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert read_trace(packed) == plain


def test_a_cut_gzip_is_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress(AZURE.encode())[:-12])
    with pytest.raises(SnapshotError, match=r"cut\.csv\.gz: cannot be read"):
        read_trace(cut)


def test_an_origin_that_is_no_time_is_named(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="noon is not a time as this trace writes them"):
        read_trace(written(tmp_path, "t.csv", AZURE), origin="noon")


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
        ("l.csv", BURST + "later,GPT-4,1,1,2,API log\n", "l.csv:5: .*later"),
        ("m.csv", BURST + "120,GPT-4,1\n", "m.csv:5: "),
        ("n.jsonl", '{"session_id": "a", "delay": 5, "input_length": 1, "output_length": 1}', "n.jsonl:1: .*no time"),
        ("o.jsonl", dynamo_record(1, 2, -3), "o.jsonl:1: .*-3 is not a number of tokens"),
        ("p.jsonl", dynamo_record(1, 2, 3) + '\n{"schema": "other.v1"}\n', "p.jsonl:2: .*schema is other.v1"),
        ("q.jsonl", dynamo_record(1, 2, 3).replace('"replay"', '"x"'), "q.jsonl:1: .*request.replay is no object"),
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
    with pytest.raises(SnapshotError, match=r"nowhere\.csv: cannot be read: No such file or directory "):
        read_trace(tmp_path / "nowhere.csv")


def test_a_folder_without_segments_is_named_as_that(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text(AZURE)
    with pytest.raises(SnapshotError, match=r"holds no \*\.jsonl or \*\.jsonl\.gz "):
        read_trace(tmp_path)


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
