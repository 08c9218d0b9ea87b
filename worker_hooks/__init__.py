"""What runs inside a worker's house: the control directory, the lifecycle, the discovery gate, the holder.

Standard library only, until a worker is really run. ``worker_hooks.serve`` is the way in for anyone's
own engine; it is loaded when it is asked for, so that the holder stays small.
"""

from __future__ import annotations

from typing import Any

__all__ = ["serve"]


def __getattr__(name: str) -> Any:
    if name == "serve":
        from worker_hooks.serving import serve

        return serve
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
