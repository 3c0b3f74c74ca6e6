"""The version; setup.py reads it without imports."""

__version__ = "0.1.0"
