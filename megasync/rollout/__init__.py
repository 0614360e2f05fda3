"""Rollout: SGLang servers and their router, the client that talks to them, and the loops that turn prompts into groups.

A workflow plays one sample, a reward function scores a group, the rollouter keeps both busy within the buffer's limits.
Modules are imported by their own names, so that a server's process does not load the loops.
"""
