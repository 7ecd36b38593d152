"""Episodes: what the policy said and was told, turn by turn, and how that becomes rows of a batch."""

from valor.agents.environment import Step, TextEnvironment
from valor.agents.formats import register_format
from valor.agents.tools import ToolResult
from valor.agents.verl_tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, function_tool

__all__ = [
    "BaseTool",
    "OpenAIFunctionToolSchema",
    "Step",
    "TextEnvironment",
    "ToolResponse",
    "ToolResult",
    "function_tool",
    "register_format",
]
