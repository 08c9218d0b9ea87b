"""The planner's decision log, read and told in sentences."""
