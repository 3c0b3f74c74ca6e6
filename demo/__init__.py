"""The demo: real text, a small GPT, features off and on, side by side. `python -m demo` from the repository's root."""
