from rollout_bench import fake_client, make_bench, make_trajectory

__all__ = ["fake_client", "make_bench", "make_trajectory"]
