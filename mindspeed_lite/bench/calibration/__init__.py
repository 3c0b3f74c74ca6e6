"""Times this machine for `mindspeed-lite plan --device here`."""
