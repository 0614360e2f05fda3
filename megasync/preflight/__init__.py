"""Looks before the run leaps: `plan` resolves a configuration on paper, `doctor` examines this machine."""
