"""The run in a seeded virtual world: the real controller, buffer, fleet and rollouter, with fakes for all I/O.

Each seed is one schedule of kills, hangs, delays and lost answers; `laws` holds what no schedule may break.
"""

from megasync.sim.world import Outcome, simulate

__all__ = ["Outcome", "simulate"]
