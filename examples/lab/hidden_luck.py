"""`valor demo --task luck`, where the policy reads zeros in place of the random digits, which a critic can be told."""

from valor.lab.luck_game import Luck


class HiddenLuck(Luck):
    def reset(self, row):
        super().reset(row)
        self._messages[:-1] = ["0"] * len(self._messages[:-1])
