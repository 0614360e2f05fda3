"""The sections of a report: a function of a run each, which returns a section without blocks if nothing is known."""
