"""What is wrong with a value of fleet.yaml, in this project's words instead of its validator's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

NAME_RULE = "lower-case letters, digits and '-', at most 63, with a letter or digit first and last"
"""In words: the pattern of a fleet's and a pool's name."""


def sentence(problem: ErrorDetails, known: Sequence[str] = ()) -> str:
    """Returns what was expected and what is there, without a full stop.

    Args:
        problem: as pydantic tells it.
        known: the fields that may stand where an unknown one was found.
    """
    kind, context = problem["type"], problem.get("ctx", {})
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return "required, and not there"
    if kind == "extra_forbidden":
        return _unknown(str(problem["loc"][-1]), known)
    if kind == "string_too_short" or (kind == "too_short" and context["actual_length"] == 0):
        return "must not be empty"
    expected = _EXPECTED.get(kind)
    if expected is None:
        # A kind that no field of today's can give: its own words are better than none.
        return problem["msg"][:1].lower() + problem["msg"][1:]
    return f"expected {expected(context)}, not {shown(problem['input'])}"


def shown(value: Any) -> str:
    """``value`` as a person wrote it, shortened."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a number of hundreds of digits"  # Python writes none of thousands
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _unknown(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, known, n=1)
    if near:
        return f"no such field; did you mean {near[0]}?"
    return f"no such field; there are {', '.join(known)}" if known else "no such field"


def _constant(text: str) -> Callable[[dict[str, Any]], str]:
    return lambda context: text


def _bound(words: str, name: str) -> Callable[[dict[str, Any]], str]:
    return lambda context: f"a number {words} {context[name]:g}"


def _pattern(context: dict[str, Any]) -> str:
    return NAME_RULE if "a-z0-9]([-" in context["pattern"] else f"what matches {context['pattern']}"


_INTEGER, _NUMBER, _TEXT = _constant("an integer"), _constant("a number"), _constant("text")
_LIST, _MAPPING, _FLAG = _constant("a list"), _constant("a mapping"), _constant("true or false")

_EXPECTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "int_type": _INTEGER,
    "int_parsing": _INTEGER,
    "int_from_float": _INTEGER,
    "int_parsing_size": _INTEGER,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": _constant("a finite number"),
    "string_type": _TEXT,
    "bool_type": _FLAG,
    "bool_parsing": _FLAG,
    "path_type": _constant("a path"),
    "tuple_type": _LIST,
    "dict_type": _MAPPING,
    "model_type": _MAPPING,
    "model_attributes_type": _MAPPING,
    "greater_than": _bound("above", "gt"),
    "greater_than_equal": _bound("of at least", "ge"),
    "less_than_equal": _bound("of at most", "le"),
    "enum": lambda context: context["expected"],
    "literal_error": lambda context: context["expected"],
    "string_pattern_mismatch": _pattern,
    "too_short": lambda context: f"at least {context['min_length']} entries",
    "too_long": lambda context: f"at most {context['max_length']} entries",
}
"""By pydantic's kind of error: what it wanted, from the error's context."""
