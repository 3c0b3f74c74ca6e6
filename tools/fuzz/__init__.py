"""Draws calls of every operator on the CPU and reports those that are wrong, raise, hang or end the process."""
