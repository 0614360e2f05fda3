"""A search agent, whole: a corpus and its index, the services that search and refine it, the agent, and its training.

`run.py` wires it; README.md is the tour.
"""
