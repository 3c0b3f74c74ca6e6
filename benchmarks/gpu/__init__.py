"""The campaign on one GPU: what is measured (`parts`), how (`units`), and the page (`page`)."""
