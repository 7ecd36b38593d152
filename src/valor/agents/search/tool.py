"""verl's search tool: `search(query_list)`, by its configuration, with its replies."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from valor.agents.search.client import SearchFailed, open_retriever, results_text
from valor.errors import UserError

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches for relevant information based on queries.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "List of search queries",
                }
            },
            "required": ["query_list"],
        },
    },
}
_NAMES = {"retrieval_service_url": "url", "default_timeout": "timeout"}  # verl's, and ours
_KEYS = ("url", "corpus", "embeddings", "topk", "timeout", "retries", "max_concurrent", "api_key_env")
_BOUNDS = ("num_workers", "rate_limit")  # verl's threads and Ray actors; here they bound the requests under way
_IGNORED = ("type", "enable_global_rate_limit")
_MAX_QUERIES = 100  # in one call


class SearchTool:
    """A tool of verl's `tool_config_path`. Every failure is the text of its reply and a metric `search_errors` of 1.

    `config` has verl's keys (`retrieval_service_url`, `topk`, `default_timeout`, `num_workers`, `rate_limit`) or those
    of `open_retriever`; a `corpus` is searched in this process. UserError: an unknown key, or neither of these two.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: Any = None) -> None:
        options = {_NAMES.get(key, key): value for key, value in config.items() if key not in _IGNORED}
        bounds = [options.pop(bound) for bound in _BOUNDS if bound in options]
        if unknown := [key for key in options if key not in _KEYS]:
            raise UserError(f"the search tool's config has no key '{unknown[0]}'; it takes {', '.join(_KEYS)}")
        if bounds:
            options["max_concurrent"] = min(bounds)
        self.tool_schema = tool_schema or SCHEMA
        self._retriever = open_retriever(**options)

    def get_openai_tool_schema(self) -> Any:
        """What the chat template shows of it."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """An instance for an episode; it has no state. `kwargs` are the row's create_kwargs."""
        return instance_id or str(uuid4())

    async def execute(self, instance_id: str, parameters: Mapping[str, Any], **kwargs: Any) -> tuple[str, float, dict]:
        """The reply {"result": text} as JSON, a reward of 0, and metrics."""
        queries = parameters.get("query_list")
        if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
            return _reply("Error: 'query_list' is missing, empty, or not a list of texts."), 0.0, {"search_errors": 1}
        if len(queries) > _MAX_QUERIES:
            return _reply(f"Error: at most {_MAX_QUERIES} queries in one call."), 0.0, {"search_errors": 1}
        try:
            results = await self._retriever.retrieve(queries)
        except SearchFailed as failure:
            return _reply(f"Search error: {failure}"), 0.0, {"search_errors": 1}
        text = results_text(results) if any(results) else "No search results found."
        return _reply(text), 0.0, {"search_results": sum(map(len, results))}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """0: searching is worth what it does for the answer."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Nothing to let go of."""


def _reply(text: str) -> str:
    return json.dumps({"result": text}, ensure_ascii=False)
