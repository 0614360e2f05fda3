"""megasync inside other training systems: thin adapters over the same engine."""
