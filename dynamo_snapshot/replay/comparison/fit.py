"""Whether the engines of a comparison can hold the requests that they are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dynamo_snapshot.errors import SnapshotError
from dynamo_snapshot.model import Reason
from dynamo_snapshot.replay.comparison.halves import Half
from dynamo_snapshot.replay.comparison.sources import Source, part
from dynamo_snapshot.replay.simulation.setting import Setting


def require_fit(sources: Sequence[Source], half: Half, settings: Mapping[str, Setting]) -> None:
    """Refuses an engine whose KV cache is smaller than a request that is played, its prompt and its answer.

    A simulated engine that runs nothing lets in whatever comes, as nothing will ever make more room for it, but how
    long passes take is known only for contexts that fit. A request's last step needs room for all its tokens.

    Args:
        settings: by the name of the trace.

    Raises:
        SnapshotError: ``configuration_invalid``, with the smallest ``engine.kv_tokens`` that would do for all.
    """
    said, least = [], 0
    for source in sources:
        kv_tokens = settings[source.name].engine.kv_tokens
        # One token each way at least, as they are simulated.
        sizes = [(max(1, one.input_tokens), max(1, one.output_tokens)) for one in part(source, half).played]
        too_large = [size for size in sizes if sum(size) > kv_tokens]
        if not too_large:
            continue
        tokens_in, tokens_out = max(too_large, key=sum)
        least = max(least, tokens_in + tokens_out)
        do = "does" if len(too_large) == 1 else "do"
        said.append(
            f"{source.name}: {len(too_large)} of {len(sizes)} requests {do} not fit into a KV cache of {kv_tokens} "
            f"tokens; the largest has {tokens_in} in and {tokens_out} out"
        )
    if said:
        raise SnapshotError(
            Reason.CONFIGURATION_INVALID,
            "; ".join(said),
            f"Write --setting engine.kv_tokens={least} or more: the least that holds each request.",
        )
