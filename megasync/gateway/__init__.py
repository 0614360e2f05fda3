"""Gateway: an OpenAI-compatible endpoint in front of the rollout client, one session a sample.

An agent that only knows `base_url` and `api_key` is trained as it is; what its requests sampled becomes trajectories.
"""

from megasync.gateway.agent import AgentWorkflow

__all__ = ["AgentWorkflow"]
