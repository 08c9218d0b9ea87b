"""A page and its parts: the frame with style and script inside, tiles, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources

from dynamo_snapshot.pages.svg import element


def page(title: str, body: str, style: str = "") -> str:
    """Returns a whole page around ``body`` (HTML); ``style`` is CSS of its own beside the shared one.

    Light and dark follow the reader's system. What has the class ``tip`` shows its ``data-tip`` when pointed at.
    """
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{_shared('page.css')}{style}</style>\n</head>\n<body>\n{body}\n"
        f'<div id="tip" role="tooltip"></div>\n<script>\n{_shared("page.js")}</script>\n</body>\n</html>\n'
    )


def tile(figure: str, meaning: str) -> str:
    return f'<div class="tile"><b>{escape(figure)}</b><span>{escape(meaning)}</span></div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def swatch(fill: str) -> str:
    """A small field of a legend."""
    return element("svg", element("rect", width=18, height=12, fill=fill, rx=2), width=18, height=12)


def _shared(name: str) -> str:
    return (resources.files("dynamo_snapshot.pages") / name).read_text(encoding="utf-8")
