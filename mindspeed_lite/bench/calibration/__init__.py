"""Times operators and collectives of this machine for `mindspeed-lite plan --device here`."""
