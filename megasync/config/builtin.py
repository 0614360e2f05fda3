"""Names that a configuration may use for what ships with this package, and where each is defined."""

REWARDS = {
    "math": "megasync.rewards.math_reward:math_reward",
    "code": "megasync.rewards.code_reward:CodeReward",
}

ENVIRONMENTS = {
    "reasoning_gym": "megasync.environments.reasoning_gym_task:ReasoningGymTask",
    "gymnasium": "megasync.environments.gymnasium_text:GymnasiumText",
}
