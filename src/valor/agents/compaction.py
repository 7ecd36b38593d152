"""Compaction: where a row nears its limit the policy writes a summary, and the episode goes on from that in a new row.

The summary is a turn of the policy like any other: sampled by it, and trained by the reward of the episode. Advantages
run over the cut (CompactionRL, https://arxiv.org/abs/2607.05378): what follows the last token of the summary is the
first token of the next row, whose value is that of prompt and summary.
"""

from __future__ import annotations

from collections.abc import Sequence

from valor.agents.chat import Conversation, Message
from valor.agents.episode import EpisodeEnd
from valor.agents.loops import LoopContext, Play
from valor.errors import UserError
from valor.rewards.answers import after_thinking

_KEY = "actor_rollout_ref.rollout.agent.compaction"


class Compaction:
    """What a row keeps free, in tokens, and how it is cut. UserError: rows have no room for that.

    reserve: for the request of a summary and the summary. least: for these and the next turn.
    """

    def __init__(self, context: LoopContext) -> None:
        options = self._options = context.config.actor_rollout_ref.rollout.agent.compaction
        self._request: Message = {"role": "user", "content": options.request}
        question: list[Message] = [{"role": "user", "content": "."}]
        longer = [*question, {"role": "assistant", "content": "."}, self._request]
        size, request = (len(context.chat.ids(context.chat.render(messages))) for messages in (question, longer))
        self.reserve = request - size + options.summary_length
        self.least = self.reserve + options.turn_length
        if self.least >= context.limits.response:
            raise UserError(
                f"{_KEY} needs {self.least} tokens of a row: turn_length={options.turn_length}, {request - size} for "
                f"the request of a summary and summary_length={options.summary_length}; a row has "
                f"{context.limits.response} after its prompt: raise data.max_response_length, or lower these"
            )

    def applies(self, play: Play) -> bool:
        """Whether the present row may be cut."""
        return len(play.cuts or ()) < self._options.max_compactions

    async def cut(self, play: Play, talk: Conversation, messages: Sequence[Message]) -> EpisodeEnd | None:
        """Have the policy summarise what `talk` has so far, and go on in a new row: the first messages, whose last one
        ends with the summary and the texts of `messages`. Not None: the episode ends here."""
        if not play.tell(talk, [self._request]):
            return "length"
        output = await play.turn(most=self._options.summary_length)
        summary = after_thinking(talk.answer(output)).strip()
        play.say("")  # it answers nobody
        if output.finish_reason == "abort":
            return "abort"
        texts = [self._options.summary.replace("{summary}", summary), *(str(m["content"]) for m in messages)]
        return None if play.cut(talk.restart("\n".join(texts)), self.least) else "length"
