"""Names of the measurements that display and curve read. Whoever measures them uses these names; any others are logged
and left alone.
"""

# Mean reward of the responses in a trained batch.
REWARD = "train/reward"
TRAINED_TOKENS = "train/tokens"
STALENESS_MEAN = "train/staleness_mean"
STALENESS_MAX = "train/staleness_max"
# Response tokens that the servers have sampled since the run began (a running total).
SAMPLED_TOKENS = "rollout/tokens"
# Groups in a state of the buffer, one key a state: buffer/generating, buffer/finished, ...
BUFFER_PREFIX = "buffer/"
# Held-out accuracy: the score that may end the run, and one key per temperature such as eval/score@0.
SCORE = "eval/score"
HELD_OUT_PREFIX = "eval/score@"
# Tokens per second of wall time over the latest steps; the observer adds them.
TRAINED_RATE = "rate/trained_tokens_per_second"
SAMPLED_RATE = "rate/sampled_tokens_per_second"
