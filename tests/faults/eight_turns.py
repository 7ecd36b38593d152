"""A loop of eight turns, some of which begin a new row, with pauses between them that differ from run to run."""

import asyncio
import random

from valor.agents.loops import AgentLoop


class EightTurns(AgentLoop):
    """Odd samples go on in a new row after every third turn."""

    async def run(self, task, generate):
        play, told = self.play(task, generate), self.chat.ids("+")
        for number in range(8):
            output = await play.turn(most=3)
            play.reward(len(set(output.token_ids)) / 8)
            if number == 7:
                return play.end(output.finish_reason)
            await asyncio.sleep(random.uniform(0.0, 0.02))
            if number % 3 == 2 and task.key[-1] % 2:
                assert play.new_row([*task.prompt_ids, *told])
            else:
                assert play.observe(told)
