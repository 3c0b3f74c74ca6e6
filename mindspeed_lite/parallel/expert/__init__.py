"""Tokens on their way to experts on other ranks and back."""
