"""The run's control loops: what happens in a step, how a loss is handled, and how far the run is.

It knows its parts by the Protocols of `interfaces` alone, and does no I/O of its own.
"""
