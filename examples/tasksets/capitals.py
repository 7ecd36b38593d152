"""A task set of verifiers (v1): a question, a tool that knows, a reward of the last answer.

valor ppo data.taskset=examples/tasksets/verifiers_tasks.py:Verifiers actor_rollout_ref.model.path=MODEL \\
    'data.taskset_kwargs={name: examples/tasksets/capitals.py:CapitalsTaskset}'
"""

import verifiers.v1 as vf

CAPITALS = {"Chile": "Santiago", "Ghana": "Accra", "Latvia": "Riga", "Nepal": "Kathmandu", "Peru": "Lima"}


class AtlasState(vf.State):
    looked_up: int = 0


class AtlasToolset(vf.Toolset[vf.ToolsetConfig, AtlasState]):
    TOOL_PREFIX = "atlas"

    @vf.tool
    def capital(self, country: str) -> str:
        """The capital of a country."""
        self.state.looked_up += 1
        return CAPITALS.get(country, "unknown")


class CapitalsData(vf.TaskData):
    answer: str


class CapitalsTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CapitalsTask(vf.Task[CapitalsData, AtlasState, CapitalsTaskConfig]):
    @classmethod
    def toolsets(cls, config: CapitalsTaskConfig) -> list[vf.Toolset]:
        return [AtlasToolset(config.tools)]

    @vf.stop
    async def long(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 3

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.1)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / (1.0 + len(trace.last_reply))

    @vf.metric
    async def looked_up(self, trace: vf.Trace) -> float:
        return float(trace.state.looked_up)


class CapitalsConfig(vf.TasksetConfig):
    copies: int = 4
    task: CapitalsTaskConfig = CapitalsTaskConfig()


class CapitalsTaskset(vf.Taskset[CapitalsTask, CapitalsConfig]):
    def load(self) -> list[CapitalsTask]:
        pairs = [*CAPITALS.items()] * self.config.copies
        return [
            CapitalsTask(CapitalsData(prompt=f"Capital of {country}?", answer=capital), self.config.task)
            for country, capital in pairs
        ]
