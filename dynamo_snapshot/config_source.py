"""A YAML file as data, and the line on which each field of it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

Location = tuple[int | str, ...]
"""The way to a field: keys and positions, the outermost first."""


_UNFIT = re.compile("[\0\ud800-\udfff]")
"""What no path, argument or UTF-8 file can hold, and YAML can say: NUL, and halves of characters."""


class Unreadable(Exception):
    """The text is no YAML, says the same thing twice, or what nothing could use.

    Args:
        line: where, counted from 1; None: nobody knows.
        problem: what is wrong there, without a full stop.
    """

    def __init__(self, line: int | None, problem: str) -> None:
        super().__init__(problem)
        self.line, self.problem = line, problem


class Source(NamedTuple):
    """What a text says, and where."""

    data: Any
    tree: yaml.Node | None

    def line_of(self, location: Location) -> int:
        """The line, from 1, of the deepest node on the way to ``location`` that the text has."""
        line, node = 1, self.tree
        for part in location:
            step: yaml.Node | None = None
            if isinstance(node, yaml.MappingNode):
                for key, value in node.value:
                    if key.value == str(part):
                        line, step = key.start_mark.line + 1, value
                        break
            elif isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
                step = node.value[part]
                line = step.start_mark.line + 1
            if step is None:
                return line
            node = step
        return line


def parse(text: str) -> Source:
    """Returns what ``text`` says. YAML itself would let the last of two equal keys win.

    Raises:
        Unreadable: it is no YAML, a mapping has a key twice, or a text has a character that nothing could use.
    """
    try:
        tree = yaml.compose(text, Loader=_Loader)
        if tree is not None:
            for node in _nodes(tree, set()):
                _refuse_duplicates(node)
                _refuse_unfit(node)
        return Source(yaml.load(text, Loader=_Loader), tree)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise Unreadable(mark.line + 1 if mark else None, f"not valid YAML: {problem}") from error
    except RecursionError as error:
        raise Unreadable(None, "nested too deeply") from error
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        # From PyYAML, for what looks like a date, a number or a tagged value and is none.
        raise Unreadable(None, f"not valid YAML: {error}") from error


class _Loader(yaml.SafeLoader):
    """Takes 1e-9 for a number, as YAML 1.2 does; PyYAML wants a point in it, and takes it for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _refuse_duplicates(node: yaml.Node) -> None:
    lines: dict[str, int] = {}
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode):
            continue  # refused later: no field's name is a list or a mapping
        line = key.start_mark.line + 1
        if key.value in lines:
            raise Unreadable(line, f"{key.value} stands here and in line {lines[key.value]}: one of them must go")
        lines[key.value] = line


def _refuse_unfit(node: yaml.Node) -> None:
    found = _UNFIT.search(node.value) if isinstance(node, yaml.ScalarNode) else None
    if found:
        raise Unreadable(node.start_mark.line + 1, f"a text with the character {ord(found[0]):#06x} in it")


def _nodes(node: yaml.Node, seen: set[int]) -> Iterator[yaml.Node]:
    """``node`` and all below it, each once: an alias leads to the node of its anchor again."""
    if id(node) in seen:
        return
    seen.add(id(node))
    yield node
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield from _nodes(key, seen)
            yield from _nodes(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _nodes(item, seen)
