"""Imports the features, for the processes of tests that start with them (`processes.PRELOADED`)."""

from mindspeed_lite import runtime

CATALOGUE = runtime.catalogue()
