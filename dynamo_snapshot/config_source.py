"""A YAML file as data, and the line on which each field of it stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml

Location = tuple[int | str, ...]
"""The way to a field: keys and positions, the outermost first."""


class Unreadable(Exception):
    """The text is no YAML, or says the same thing twice.

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
        Unreadable: it is no YAML, or a mapping has a key twice.
    """
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        if tree is not None:
            _refuse_duplicates(tree)
        return Source(yaml.safe_load(text), tree)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        raise Unreadable(mark.line + 1 if mark else None, f"not valid YAML: {problem}") from error


def _refuse_duplicates(tree: yaml.Node) -> None:
    for mapping in _mappings(tree, set()):
        lines: dict[str, int] = {}
        for key, _ in mapping.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # refused later: no field's name is a list or a mapping
            line = key.start_mark.line + 1
            if key.value in lines:
                raise Unreadable(line, f"{key.value} stands here and in line {lines[key.value]}: one of them must go")
            lines[key.value] = line


def _mappings(node: yaml.Node, seen: set[int]) -> Iterator[yaml.MappingNode]:
    """All mappings at and below ``node``, each once: an alias leads to the node of its anchor again."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        yield node
        for key, value in node.value:
            yield from _mappings(key, seen)
            yield from _mappings(value, seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _mappings(item, seen)
