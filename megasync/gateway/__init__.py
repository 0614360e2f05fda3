"""Gateway: endpoints of OpenAI's and Anthropic's APIs in front of the rollout client, one session per sample.

An agent that only needs a `base_url` and an `api_key` can be trained unchanged. The completions that its requests
sample become trajectories.
"""

from megasync.gateway.agent import AgentWorkflow
from megasync.gateway.external import ExternalAgents

__all__ = ["AgentWorkflow", "ExternalAgents"]
