"""Names of the measurements that display and curve read. Whoever measures them uses these names; any others are logged
and left alone.
"""

import re

# Mean reward of the latest groups.
REWARD = "rollout/reward_mean"
TRAINED_TOKENS = "train/tokens"
STALENESS_MEAN = "train/staleness_mean"
STALENESS_MAX = "train/staleness_max"
# Groups in a state of the buffer, one key a state: buffer/generating, buffer/finished, ...
BUFFER_PREFIX = "buffer/"
# Held-out accuracy: the score that may end the run, and one key per temperature such as eval/score@0.
SCORE = "eval/score"
HELD_OUT_PREFIX = "eval/score@"
# The same of a set that has a name, eval/<set>/score and eval/<set>/score@0; and how the one without is called.
SET_SCORE = re.compile(r"eval/([\w-]+)/score")
SET_SCORE_AT = re.compile(r"eval/([\w-]+)/score@(.+)")
UNNAMED_SET = "eval"
# Tokens per second of wall time: sampled by the servers, and trained (the observer adds that one).
SAMPLED_RATE = "rollout/tokens_per_second"
TRAINED_RATE = "train/tokens_per_second"
