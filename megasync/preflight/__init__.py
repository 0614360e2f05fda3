"""Refuses a configuration that contradicts itself, its model or its machine, before any process starts (`check`)."""
