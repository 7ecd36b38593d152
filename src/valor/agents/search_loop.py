"""Search-R1's loop: the policy writes <search>query</search> and reads documents, until it writes an <answer>
(https://arxiv.org/abs/2503.09516)."""

import re
import time
from dataclasses import replace
from typing import Any

from valor.agents.env_loop import call_record
from valor.agents.episode import Episode
from valor.agents.formats import ToolCall, valid_text
from valor.agents.loops import AgentLoop, Generate, LoopContext, Task, register_loop
from valor.agents.search.client import SearchFailed, documents_text, open_retriever
from valor.agents.tools import ToolResult
from valor.rewards.search_r1 import INVALID_ACTION

_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@register_loop("search_agent")
class SearchLoop(AgentLoop):
    """Turns of at most `data.max_response_length` tokens and `max_turns` searches; then one turn without a search.

    The row's text continues as it is: no chat template comes between the turns.
    """

    def __init__(self, context: LoopContext) -> None:
        super().__init__(context)
        config = context.config
        self._max_turns, self._turn_length = config.max_turns, config.data.max_response_length
        self._stop = self.chat.stop_texts("</search>", "</answer>")
        self._before, self._after = self.chat.ids("\n\n<information>"), self.chat.ids("</information>\n\n")
        self._invalid = self.chat.ids(INVALID_ACTION)
        self._max_documents = max(config.data.max_obs_length - len(self._before) - len(self._after), 1)  # tokens
        retriever = config.retriever
        corpus = retriever.corpus_path if retriever.url is None else None
        timeout = config.actor_rollout_ref.rollout.multi_turn.tool_timeout
        self._retriever = open_retriever(retriever.url, corpus, topk=retriever.topk, timeout=timeout)

    async def run(self, task: Task, generate: Generate) -> Episode:
        play = self.play(task, generate)
        calls: list[dict[str, Any]] = []
        info: dict[str, Any] = {"calls": calls, "invalid_actions": 0}
        while True:
            output = await play.turn(most=self._turn_length, stop=self._stop)
            if output.finish_reason == "abort":
                return play.end("abort", info=info)
            text = self.chat.decode(output.token_ids)
            action = _ACTION.search(text)
            if action is not None and action[1] == "search":
                play.say(text[: action.start()] + text[action.end() :])
            if action is not None and action[1] == "answer":
                return play.end("stop", info=info)
            if len(play.turns) > self._max_turns:
                return play.end("turns", info=info)
            observation = self._invalid
            if action is not None:
                observation = await self._documents(action[2].strip(), len(play.turns), calls)
            else:
                info["invalid_actions"] += 1
            if not play.observe(observation):
                return play.end("length", info=info)

    async def _documents(self, query: str, turn: int, calls: list[dict[str, Any]]) -> list[int]:
        call, began = ToolCall("search", {"query": query}), time.monotonic()
        try:
            (found,) = await self._retriever.retrieve([call.arguments["query"]])
            result = ToolResult(documents_text(found))
        except SearchFailed as failure:
            result = ToolResult(f"Search error: {failure}", error="failed")
        result = replace(result, text=valid_text(result.text), seconds=time.monotonic() - began)
        calls.append(call_record(turn, call, result))
        documents = self.chat.ids(self.chat.safe(result.text.strip()))
        return [*self._before, *documents[: self._max_documents], *self._after]
