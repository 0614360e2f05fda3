"""Ray, and nothing but Ray: pools, actors and their lifecycle. The only room that imports it.

Every actor is a thin shell over a plain class of another room; `roles` says which role lives in which pool.
"""
