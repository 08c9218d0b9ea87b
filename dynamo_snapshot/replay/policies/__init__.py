"""Scaling policies for the simulator: rivals written from their documented rules, and the adapter for ours."""
