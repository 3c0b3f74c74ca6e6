"""Measures what a machine's operators and collectives take, for the cost model of `mindspeed-lite plan`.

operators    what is timed: products, attention, vector work, the optimizer, each at several shapes
worker       a process of a measurement: operators, then messages by size and group
run          starts the processes, and writes the file
trainings    runs short trainings of a script
probe        what a training takes beside its operators and messages
samples      what repeated times of the same work say
"""
