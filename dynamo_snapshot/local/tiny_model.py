"""A model folder of a few hundred kilobytes, for Dynamo's mocker: a real tokenizer, no weights.

The frontend, the mocker and the model card need a tokenizer, a chat template and a configuration;
nothing reads weights. The same bytes come out each time, so the model's identity is stable. The
mocker answers with token ids between about 1000 and 1500: each of them is readable text here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTEXT_LENGTH = 32768

_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_SPACE = "Ġ"
"""How byte-level BPE writes a space."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(folder: Path) -> Path:
    """Writes the model into ``folder``, which is made if needed, and returns it.

    The content is deterministic. Needs the ``tokenizers`` package, which Dynamo's frontend brings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": CONTEXT_LENGTH,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
        },
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "model_max_length": CONTEXT_LENGTH,
            "chat_template": CHAT_TEMPLATE,
            "add_bos_token": False,
        },
    )
    _write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [2], "max_new_tokens": 256})
    return folder


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = _merges()
    tokens = [*SPECIAL_TOKENS, *alphabet, *(left + right for left, right in merges)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def _merges() -> list[tuple[str, str]]:
    """Consonant and vowel, the same after a space, and both with a closing consonant: 4641 merges."""
    pairs = [(consonant, vowel) for consonant in _CONSONANTS for vowel in _VOWELS]
    spaces = [(_SPACE, consonant) for consonant in _CONSONANTS]
    spaced = [(_SPACE + consonant, vowel) for consonant, vowel in pairs]
    closed = [(left + right, end) for left, right in (*spaced, *pairs) for end in _CONSONANTS]
    return [*spaces, *spaced, *pairs, *closed]


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Writes the model folder that the example fleet names.")
    parser.add_argument("folder", type=Path, help="where; made if missing")
    print(write_tiny_model(parser.parse_args().folder))
