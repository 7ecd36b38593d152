"""Episodes: what the policy said and was told, turn by turn, and how that becomes rows of a batch."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from valor.agents.environment import Step, TextEnvironment
    from valor.agents.formats import register_format
    from valor.agents.tools import ToolResult
    from valor.agents.verl_tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, function_tool

_MODULES = {
    "environment": ("Step", "TextEnvironment"),
    "formats": ("register_format",),
    "tools": ("ToolResult",),
    "verl_tools": ("BaseTool", "OpenAIFunctionToolSchema", "ToolResponse", "function_tool"),
}
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


def __getattr__(name: str) -> Any:
    """The names above, imported when they are first used: torch is behind some of them."""
    for module, names in _MODULES.items():
        if name in names:
            return resolve_name(f"valor.agents.{module}:{name}")
    raise AttributeError(f"module 'valor.agents' has no attribute '{name}'")
