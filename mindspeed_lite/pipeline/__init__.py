"""Orders the work of a training step."""
