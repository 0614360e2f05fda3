"""What a service has done so far, for its `/stats`."""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Sequence

# Latencies are of so many requests, the last ones.
WINDOW = 1000


class Stats:
    def __init__(self) -> None:
        self.requests = 0
        self.failed = 0
        self._batches: Counter[int] = Counter()
        self._latencies: deque[float] = deque(maxlen=WINDOW)

    def batch(self, size: int) -> None:
        self._batches[size] += 1

    def request(self, seconds: float, ok: bool) -> None:
        self.requests += 1
        self.failed += not ok
        self._latencies.append(seconds)

    def summary(self) -> dict:
        """Latencies in milliseconds; batch sizes in queries, and how many batches had each size."""
        batches = sum(self._batches.values())
        queries = sum(size * count for size, count in self._batches.items())
        return {
            "requests": self.requests,
            "failed": self.failed,
            "queries": queries,
            "batches": batches,
            "batch_size_mean": queries / batches if batches else 0.0,
            "batch_sizes": {str(size): self._batches[size] for size in sorted(self._batches)},
            "latency_ms_p50": _quantile(self._latencies, 50),
            "latency_ms_p95": _quantile(self._latencies, 95),
        }


def _quantile(seconds: Sequence[float], percent: int) -> float:
    if len(seconds) < 2:
        return 1000 * sum(seconds)
    return 1000 * statistics.quantiles(seconds, n=100, method="inclusive")[percent - 1]
