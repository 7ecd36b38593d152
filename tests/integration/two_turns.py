"""A loop of two turns for tests: the policy answers, is told something, and answers again."""

from pathlib import Path

import yaml

from valor.agents.loops import AgentLoop


def settings(folder: Path, **arguments) -> list[str]:
    """The keys of a run with such episodes; `folder` gets the file that names the loop."""
    file, agent = folder / "loops.yaml", "actor_rollout_ref.rollout.agent"
    file.write_text(yaml.safe_dump([{"name": "two", "_target_": f"{__file__}:TwoTurns", **arguments}]))
    loops = [f"{agent}.agent_loop_config_path={file}", f"{agent}.default_agent_loop=two", f"{agent}.deterministic=true"]
    return [*loops, "data.max_response_length=24"]


class TwoTurns(AgentLoop):
    """`told` comes between the turns; odd samples go on in a new row. The first turn is worth `reward`, and ends at one
    of the letters in `stop`."""

    def __init__(self, context, told="again: ", forks=False, reward=0.0, stop=""):
        super().__init__(context)
        self.stop = context.chat.stop_texts(*stop) if stop else None
        self.told, self.forks, self.reward = context.chat.ids(told), forks, reward

    async def run(self, task, generate):
        play = self.play(task, generate)
        output = await play.turn(most=3, stop=self.stop)
        play.reward(self.reward)
        if self.forks and task.key[-1] % 2:
            assert play.new_row([*task.prompt_ids, *self.told])
        else:
            assert play.observe(self.told)
        output = await play.turn(most=4)
        return play.end(output.finish_reason)
