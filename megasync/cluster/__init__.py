"""Ray: pools, actors and their lifecycle. The only package that imports it.

Every actor is a thin shell over a plain class of another room; `roles` says which role lives in which pool.
"""
