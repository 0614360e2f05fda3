"""The run's control loops: what happens in a step, what is done about a loss, and where the run stands.

It knows its parts by the protocols of `interfaces` alone, and does no I/O of its own.
"""
