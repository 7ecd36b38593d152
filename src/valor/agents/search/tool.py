"""verl's search tool: `search(query_list)`, by its configuration, with its replies."""

import json
from typing import Any

from valor.agents.search.client import SearchFailed, open_retriever, results_text
from valor.agents.tools import ToolResult
from valor.agents.verl_tools import BaseTool, OpenAIFunctionToolSchema
from valor.errors import UserError

_QUERIES = {"type": "array", "items": {"type": "string"}, "description": "List of search queries"}
_SCHEMA = {
    "name": "search",
    "description": "Searches for relevant information based on queries.",
    "parameters": {"type": "object", "properties": {"query_list": _QUERIES}, "required": ["query_list"]},
}
_NAMES = {"retrieval_service_url": "url", "default_timeout": "timeout"}  # verl's, and ours
_KEYS = ("url", "corpus", "topk", "timeout", "retries", "max_concurrent", "api_key_env")
_BOUNDS = ("num_workers", "rate_limit")  # verl's threads and Ray actors; here they bound the requests under way
_IGNORED = ("type", "enable_global_rate_limit")


class SearchTool(BaseTool):
    """A tool of verl's `tool_config_path`; a failure is the reply's text, and counted as `failed`.

    `config` has verl's keys (`retrieval_service_url`, `topk`, `default_timeout`, `num_workers`, `rate_limit`) or those
    of `open_retriever`; a `corpus` is searched in this process. UserError: an unknown key, or neither of these two.
    """

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate({"function": _SCHEMA}))
        options = {_NAMES.get(key, key): value for key, value in config.items() if key not in _IGNORED}
        bounds = [options.pop(bound) for bound in _BOUNDS if bound in options]
        if unknown := [key for key in options if key not in _KEYS]:
            raise UserError(f"the search tool's config has no key '{unknown[0]}'; it takes {', '.join(_KEYS)}")
        if bounds:
            options["max_concurrent"] = min(bounds)
        self._retriever = open_retriever(**options)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResult:
        """The reply {"result": text} as JSON."""
        try:
            results, error = await self._retriever.retrieve(parameters["query_list"]), None
            text = results_text(results) if any(results) else "No search results found."
        except SearchFailed as failure:
            text, error = f"Search error: {failure}", "failed"
        return ToolResult(json.dumps({"result": text}, ensure_ascii=False), error=error)
