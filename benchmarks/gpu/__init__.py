"""The campaign on one GPU: its steps (`steps`), what is timed (`kernels`), and the page (`page`)."""
