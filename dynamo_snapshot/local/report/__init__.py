"""The page of a demo run: one self-contained file, no script or style from elsewhere."""

from __future__ import annotations

from dynamo_snapshot.local.report.page import render

__all__ = ["render"]
