"""A software-engineering agent, whole: its tasks, the harness that plays them, and the agent that a run trains."""
