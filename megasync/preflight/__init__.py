"""Checks before a run: `check` refuses bad configurations, `plan` resolves them, `doctor` examines the machines."""
