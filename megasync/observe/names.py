"""Names of the metrics that the display and the curve read. All other metrics are only logged."""

import re

# Mean reward of the responses that the step trained on, without dropped groups and those of later steps.
REWARD = "train/reward"
TRAINED_TOKENS = "train/tokens"
STALENESS_MEAN = "train/staleness_mean"
STALENESS_MAX = "train/staleness_max"
# Number of groups per buffer state: buffer/generating, buffer/finished, ...
BUFFER_PREFIX = "buffer/"
# Held-out accuracy: the score that schedule.stop_at_score compares, and one key per temperature, such as eval/score@0.
SCORE = "eval/score"
HELD_OUT_PREFIX = "eval/score@"
# The same for a named set: eval/<set>/score and eval/<set>/score@0. The set under data.eval is called UNNAMED_SET.
SET_SCORE = re.compile(r"eval/([\w-]+)/score")
SET_SCORE_AT = re.compile(r"eval/([\w-]+)/score@(.+)")
UNNAMED_SET = "eval"
# Tokens per second of wall time: sampled by the servers, and trained (computed by the observer).
SAMPLED_RATE = "rollout/tokens_per_second"
TRAINED_RATE = "train/tokens_per_second"
# Of supervised training: mean negative log-prob of the trained tokens, of a step and of the held-out rows.
TRAINING_LOSS = "sft/loss"
VALIDATION_LOSS = "sft/validation_loss"
TENANT_PREFIX = "tenant/"
