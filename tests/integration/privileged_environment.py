"""An environment whose outcome is what it has drawn, shown to a critic alone."""

from valor.agents.env import Env, Step


class Drawn(Env):
    def reset(self, row):
        self.digit = row["episode_key"][2] % 10
        self.hidden = {"drawn": self.digit}

    def step(self, text):
        return Step("", self.digit / 10, True)


class Rewritten(Drawn):
    def reset(self, row):
        super().reset(row)
        return "?"
