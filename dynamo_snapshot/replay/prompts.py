"""Prompts of a wanted length: words that are one token each for the bundled tiny model.

For another tokenizer the length is approximate. Prompts differ from their first words on, so prefix
caching does not make later ones free.
"""

from __future__ import annotations

_VOWELS = "aeiou"
_CONSONANTS = "bcdfghjklmnpqrstvwxyz"
_WORDS = tuple(f" {first}{vowel}{last}" for first in _CONSONANTS for vowel in _VOWELS for last in _CONSONANTS)
_STRIDE = 577
"""Coprime with the number of words, so consecutive prompts start far apart and do not repeat soon."""


def prompt(index: int, tokens: int) -> str:
    """Returns ``tokens`` words, those of ``index``; the same for the same arguments."""
    start = index * _STRIDE
    return "".join(_WORDS[(start + position) % len(_WORDS)] for position in range(tokens))
