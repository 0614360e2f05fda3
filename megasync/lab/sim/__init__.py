"""Deterministic simulation of a run: the real controller, buffer, fleet and rollouter over fake I/O in virtual time.

Each seed is one schedule of kills, hangs, delays and lost replies. `invariants` holds the invariants of every schedule.
"""

from megasync.lab.sim.schedule import Outcome, simulate

__all__ = ["Outcome", "simulate"]
