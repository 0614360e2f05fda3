"""Adapters that join megasync to software of others, a file or a folder for each.

No room of a run imports this one. A run loads what its configuration names, by the table of `config.builtin`.
"""
