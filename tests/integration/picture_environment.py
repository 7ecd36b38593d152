"""An environment that shows a picture after each move, and tools that show some."""

from tiny_vision import picture
from valor.agents import Env, ToolResponse, function_tool


class Pictures(Env):
    """The first picture is in its first message, in place of the row's."""

    tools = ("look",)

    def reset(self, row):
        self.moves, self.seed = 0, row["episode_key"][2]
        return [{"role": "user", "content": [self.part(), {"type": "text", "text": "where?"}]}]

    def part(self):
        return {"type": "image", "image": picture(16, 16 + 8 * (self.moves % 2), 10 * self.seed + self.moves)}

    def step(self, text):
        self.moves += 1
        shown = [{"type": "text", "text": "now"}, self.part(), {"type": "text", "text": "and?"}]
        return [{"role": "user", "content": shown}], 0.1, self.moves == 3

    def look(self):
        """Look."""
        return ToolResponse(text="there", image=[picture(16, 16, 1)])


class Opened(Pictures):
    """The row's own pictures come first."""

    def reset(self, row):
        super().reset(row)
        return "begin"


class Broken(Pictures):
    def part(self):
        return {"type": "image", "image": b"no image"}


@function_tool
def show(count: int):
    """Show pictures.

    Args:
        count: How many.
    """
    return ToolResponse(text="these", image=[picture(16, 16, seed) for seed in range(count)])
