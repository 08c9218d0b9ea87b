"""A module's tensors keep their values, ties, strides and addresses while their memory goes and comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from worker_hooks.weights.segment import SegmentStore
from worker_hooks.weights.torch_arena import TorchArena


@pytest.fixture
def module() -> Any:
    import torch

    class Tied(torch.nn.Module):  # type: ignore[misc]  # torch is not installed where types are checked
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(100_000, 256)
            self.head = torch.nn.Linear(256, 100_000, bias=False)
            self.head.weight = self.embedding.weight
            self.turned = torch.nn.Parameter(torch.randn(256, 64).t())
            self.register_buffer("positions", torch.arange(97))
            self.register_buffer("empty", torch.empty(0))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens)
            return self.head(hidden) + (hidden @ self.turned.t()).sum() + self.positions.sum()

    torch.manual_seed(0)
    return Tied().cuda().requires_grad_(False)


def test_a_module_is_the_same_before_in_and_after(module: Any, tmp_path: Path) -> None:
    import torch

    tokens = torch.arange(32, device="cuda")
    values = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    arena = TorchArena(module)
    assert all(torch.equal(tensor, values[name]) for name, tensor in module.state_dict().items())
    expected = module(tokens)
    assert module.head.weight.data_ptr() == module.embedding.weight.data_ptr()
    assert module.turned.stride() == (1, 64)
    addresses = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    free = torch.cuda.mem_get_info()[0]

    store = SegmentStore(tmp_path / "segments")
    segments = arena.quiesce(store)
    assert not arena.attached
    assert torch.cuda.mem_get_info()[0] > free + arena.size - (32 << 20)
    arena.resume(store)

    assert arena.attached
    assert torch.equal(module(tokens), expected)
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == addresses
    assert [segment.size for segment in segments] == [arena.size]
    assert arena.quiesce(store) == segments, "what has not changed has the same digest"
    arena.resume(store)
