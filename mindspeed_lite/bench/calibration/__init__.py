"""Measures what a machine's operators and collectives take, for the cost model of `mindspeed-lite plan`.

operators    what is timed: products, attention, vector work, the optimizer, each at several shapes
collectives  messages by size and group
worker       a process of a measurement
run          starts the processes, and writes the file
"""
