"""Writes a model folder with random weights whose tokenizer has a word for every id: ``dynamo_model.py FOLDER SHAPE``.

The same bytes come out each time. A random model says any id of its vocabulary, and a frontend has to spell it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dynamo_snapshot.local.tiny_model import write_tiny_model

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": 8192,
    },
}


def write_model(folder: Path, shape: str) -> None:
    """Makes a Qwen3 of one of :data:`SHAPES` in bfloat16, on the GPU where there is one, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    write_tiny_model(folder)
    config = Qwen3Config(
        **SHAPES[shape],
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    spell_every_id(folder, config.vocab_size)


def spell_every_id(folder: Path, vocabulary: int) -> None:
    """Adds words that no text is made of to the folder's tokenizer until it has ``vocabulary`` of them."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    words = tokenizer["model"]["vocab"]
    for number in range(len(words), vocabulary):
        words[f"Ġw{number}"] = number
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), sys.argv[2])
