"""Exchanges of tokens with experts on other ranks."""
