"""Scaling policies side by side: runs of the simulation, what they came to, and who beats whom."""
