"""Weights kept out of the process image: segments, and memory that can be given up and taken back in place."""
