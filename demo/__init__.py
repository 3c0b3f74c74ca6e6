"""The demo: real text, a small GPT, features off and on. `python -m demo` from the repository's root."""
