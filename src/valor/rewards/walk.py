"""Walks through rooms: choices whose worth is told at the end alone. The task of `valor demo --task walk`."""

import json
from dataclasses import dataclass
from typing import Any

DOORS = "abcdefgh"


@dataclass(frozen=True)
class Walk:
    """Rooms are digits, doors letters: door d of room s leads to room `leads[s][d]` and gains `gains[s][d]`, in [0, 1].

    A response writes each door that it takes and the room behind it, `a3b0a5…`, `length` times, from room `start` on;
    its outcome is the mean gain.
    """

    leads: list[list[int]]
    gains: list[list[float]]
    length: int
    start: int = 0

    def outcome(self, text: str) -> float | None:
        """Mean gain of a response; None where it is no whole walk through these rooms, to the character."""
        room, total = self.start, 0.0
        if len(text) != 2 * self.length:
            return None
        for letter, digit in zip(text[::2], text[1::2], strict=True):
            door = DOORS.find(letter)
            if not 0 <= door < len(self.leads[room]) or digit != str(self.leads[room][door]):
                return None
            total, room = total + self.gains[room][door], self.leads[room][door]
        return total / self.length

    def to_go(self, uniform: bool = False) -> list[list[float]]:
        """[steps left][room]: the largest sum of gains (Bellman 1957, by dynamic programming); that of doors taken at
        random for `uniform`."""
        values = [[0.0] * len(self.leads)]
        for _ in range(self.length):
            after = values[-1]
            options = [
                [g + after[s] for g, s in zip(*pair, strict=True)] for pair in zip(self.gains, self.leads, strict=True)
            ]
            values.append([sum(q) / len(q) if uniform else max(q) for q in options])
        return values


def grade(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score of a walk: its mean gain, 0 where it is none.

    Components: `acc` 1 when no walk from that room gains more, `whole` 1 when it is a walk, `regret` what it gains less
    than the best.
    """
    walk = Walk(**json.loads(ground_truth))
    outcome = walk.outcome(solution_str)
    regret = walk.to_go()[-1][walk.start] / walk.length - (outcome or 0.0)
    return {"score": outcome or 0.0, "acc": float(regret < 1e-9), "whole": float(outcome is not None), "regret": regret}
