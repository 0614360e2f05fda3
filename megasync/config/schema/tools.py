"""The section of the tool agent."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ToolsConfig:
    """Tools of the tool agent: docs/workflows.md."""

    # `package.module:function` of each tool. Any here makes the tool agent the workflow.
    functions: list[str] = field(default_factory=list)
    # Answers of the model in one sample.
    max_turns: int = 8
    # Seconds for one call of a tool.
    timeout: float = 60.0
    # Characters of a tool's output that the model is shown.
    max_output: int = 8192
