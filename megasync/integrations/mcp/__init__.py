"""Joins servers of the Model Context Protocol: their tools."""
