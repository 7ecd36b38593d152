"""Episodes: conversations of the policy with tools and environments, turn by turn, and their rows of a batch."""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from valor.agents.env import Env, Step
    from valor.agents.formats import register_format
    from valor.agents.tools import ToolResult
    from valor.agents.verl_tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse, function_tool

_MODULES = {"Env": "env", "Step": "env", "ToolResult": "tools", "register_format": "formats"}
__all__ = ["BaseTool", "Env", "OpenAIFunctionToolSchema", "Step", "ToolResponse", "ToolResult"]
__all__ += ["function_tool", "register_format"]


def __getattr__(name: str) -> Any:
    """The names above, imported when they are first used: torch is behind some of them."""
    if name in __all__:
        return resolve_name(f"valor.agents.{_MODULES.get(name, 'verl_tools')}:{name}")
    if name == "TextEnvironment":
        raise ImportError("valor.agents.TextEnvironment is now Env, and its open() reset()")
    raise AttributeError(f"module 'valor.agents' has no attribute '{name}'")
