"""What users of verl have: a BaseTool, and agent loops of their own, one of which is known by `@register`."""

from valor.agents import BaseTool, ToolResponse
from valor.agents.verl_loop import AgentLoopBase, AgentLoopOutput, register


class Echo(BaseTool):
    """Says what its instance was created with."""

    async def create(self, instance_id=None, *, word="?", **kwargs):
        self.words = {**getattr(self, "words", {}), instance_id: word}
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text=self.words[instance_id]), 0.25, {"length": len(parameters["text"])}

    async def calc_reward(self, instance_id, **kwargs):
        return 1.0

    async def release(self, instance_id, **kwargs):
        del self.words[instance_id]


class Twice(AgentLoopBase):
    """Two turns with a text of others between them; log-probs are given for the first alone."""

    def __init__(self, *args, told="and?", **kwargs):
        super().__init__(*args, **kwargs)
        self.told = told

    async def run(self, sampling_params, **kwargs):
        prompt = self.tokenizer.apply_chat_template(kwargs["raw_prompt"], add_generation_prompt=True, return_dict=False)
        told = self.tokenizer.encode(self.told, add_special_tokens=False)
        sampling = {**sampling_params, "max_tokens": 4}
        first = await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=sampling)
        ids = [*first.token_ids, *told]
        second = await self.server_manager.generate("a", prompt_ids=[*prompt, *ids], sampling_params=sampling)
        mask = [1] * len(first.token_ids) + [0] * len(told) + [1] * len(second.token_ids)
        score = float(len(set(second.token_ids)) % 2)
        output = AgentLoopOutput(prompt, [*ids, *second.token_ids], mask, reward_score=score, num_turns=2, metrics={})
        return output


@register("told_more")
class ToldMore(Twice):
    """The same with other words."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, told="more!", **kwargs)
