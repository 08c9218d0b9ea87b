"""Snapshot scaling for NVIDIA Dynamo."""

__version__ = "0.1.0"
