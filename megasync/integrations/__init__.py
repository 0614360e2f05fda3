"""megasync's parts inside other people's training systems, each a thin adapter over the same engine."""
