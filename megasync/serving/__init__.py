"""SGLang processes: server, router, supervisor, ports, health. No rollout logic.

A plain class for each process; `cluster` runs them in actors.
"""
