from rollout_bench import fake_client

__all__ = ["fake_client"]
