"""Patches on against off in training, operators against plain PyTorch, memory predicted against measured.

Nothing but the commands imports this.
"""
