"""`megasync sft`: supervised training of the policy model, before reinforcement learning goes on from its export."""
