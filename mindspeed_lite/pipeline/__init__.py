"""In what order the work of a training step runs."""
