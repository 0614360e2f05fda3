"""Joins verifiers: its tasksets, and its environments, which play whole episodes against the gateway."""
