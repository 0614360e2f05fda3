"""Models of several tenants on the ranks of one trainer: what `megasync serve` adds to a run's ranks and checks."""
