"""Search with a critic over beginnings of answers: beams over blocks, and Monte-Carlo trees.

`valor critic search` chooses among whole answers; these two go on from what they have chosen. Both take a `Searcher`,
which samples, reads values and counts the tokens of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import sqrt

import torch

from valor.data.batch import Batch, text_rows
from valor.models.value import ValueModel
from valor.rollout.base import Request, RolloutEngine, SamplingParams

SEARCH_STREAM = -4  # second word of the key of a sample's random numbers


@dataclass
class Path:
    """A response so far: its tokens, whether it has ended, the critic's value of it."""

    ids: tuple[int, ...] = ()
    ended: bool = False
    value: float = 0.0


@dataclass
class Spent:
    """Tokens."""

    sampled: int = 0
    read: int = 0


class Searcher:
    """A policy's engine and a critic on prompts [P] of token ids. `params`: how the policy samples; `max_tokens` is the
    most of a response. All prompts advance together; what is drawn depends on the seed and the order of the calls."""

    def __init__(
        self,
        engine: RolloutEngine,
        critic: ValueModel,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        seed: int,
        most_read: int = 65536,
    ) -> None:
        self.engine, self.critic, self.prompts, self.seed = engine, critic, prompts, seed
        self.params = replace(params, ignore_eos=False)  # answers are to end
        self.spent, self._drawn, self._most_read = Spent(), 0, most_read

    def extend(self, paths: Sequence[tuple[int, Path]], tokens: int | None = None) -> list[Path]:
        """Each (prompt number, path) with up to `tokens` further ones (None: to its end), and its value."""
        limit, requests = self.params.max_tokens, []
        for prompt, path in paths:
            room = limit - len(path.ids)
            params = replace(self.params, max_tokens=room if tokens is None else min(tokens, room))
            key = (self.seed, SEARCH_STREAM, self._drawn)
            requests.append(Request(str(self._drawn), [*self.prompts[prompt], *path.ids], params, key))
            self._drawn += 1
        longer = []
        for (_, path), output in zip(paths, self.engine.generate(requests), strict=True):
            self.spent.sampled += len(output.token_ids)
            ids = (*path.ids, *output.token_ids)
            longer.append(Path(ids, output.finish_reason == "stop" or len(ids) >= limit))
        for path, value in zip(longer, self._values([p for p, _ in paths], longer), strict=True):
            path.value = value
        return longer

    def _values(self, prompts: Sequence[int], paths: Sequence[Path]) -> list[float]:
        """V of the state after each path; of an ended one V before its last token, the last that a critic learns."""
        values: list[float] = []
        longest = max(len(self.prompts[p]) + len(path.ids) for p, path in zip(prompts, paths, strict=True)) + 1
        at_once = max(1, self._most_read // longest)
        for start in range(0, len(paths), at_once):
            some = paths[start : start + at_once]
            of = [list(self.prompts[p]) for p in prompts[start : start + at_once]]
            # The state after a path is the one in which a further token would be chosen.
            rows: Batch = text_rows(of, [[*path.ids, *([] if path.ended else [0])] for path in some])
            self.spent.read += int(rows["prompt_lengths"].sum() + rows["response_lengths"].sum())
            with torch.inference_mode():
                output = self.critic(rows.tensors)["values"]
            last = rows["response_lengths"].to(output.device) - 1
            values += output.gather(1, last[:, None]).squeeze(1).tolist()
        return values

    def samples(self, number: int) -> list[list[Path]]:
        """`number` whole answers to each prompt."""
        paths = self.extend([(prompt, Path()) for prompt in range(len(self.prompts)) for _ in range(number)])
        return [paths[i : i + number] for i in range(0, len(paths), number)]


def beam(search: Searcher, number: int, width: int, block: int) -> list[list[Path]]:
    """Value-guided search over blocks (https://arxiv.org/abs/2505.17373): of `number` beginnings of an answer the
    `width` of highest value go on, each in number / width ways by `block` tokens, until all of them have ended."""
    width = min(width, number)
    beams = [[Path() for _ in range(number)] for _ in search.prompts]
    while not all(path.ended for beam in beams for path in beam):
        todo = [(p, i) for p, beam in enumerate(beams) for i, path in enumerate(beam) if not path.ended]
        grown = search.extend([(p, beams[p][i]) for p, i in todo], block)
        for (p, i), path in zip(todo, grown, strict=True):
            beams[p][i] = path
        for p, beam in enumerate(beams):
            if not all(path.ended for path in beam):
                best = sorted(beam, key=lambda path: -path.value)[:width]
                beams[p] = [best[i % width] for i in range(number)]
    return beams


def tree(search: Searcher, simulations: int, width: int, block: int, c_puct: float) -> list[list[Path]]:
    """Monte-Carlo tree search, the critic the value of leaves, after PPO-MCTS (https://arxiv.org/abs/2309.15028).

    Each simulation goes down from the present node by the child of highest
    Q(s, a) + c p(a | s) √N(s) / (1 + N(s, a)) and adds the children of the leaf that it comes to; every node on the
    way gains the mean of their values. After `simulations` the most visited child becomes the present node. A child
    is a block of `block` tokens: of `width` that the policy samples, equal ones are one child and p is its share.
    (PPO-MCTS: children are the k likeliest tokens, p their probabilities, with a KL term in the reward.) One answer
    to each prompt.
    """
    nodes = [Node(Path()) for _ in search.prompts]
    while any(not node.path.ended for node in nodes):
        going = [p for p, node in enumerate(nodes) if not node.path.ended]
        for _ in range(simulations):
            ways = {p: nodes[p].descend(c_puct) for p in going}
            leaves = {p: way[-1] for p, way in ways.items() if not way[-1].path.ended}
            asked = [(p, leaf.path) for p, leaf in leaves.items() for _ in range(width)]
            grown = search.extend(asked, block) if asked else []
            for number, leaf in enumerate(leaves.values()):
                leaf.expand(grown[number * width : (number + 1) * width])
            for way in ways.values():
                value = way[-1].mean_of_children()
                for node in way:
                    node.visits += 1
                    node.total += value
        for p in going:
            nodes[p] = max(nodes[p].children, key=lambda child: (child.visits, child.path.value))
    return [[node.path] for node in nodes]


@dataclass
class Node:
    """A beginning of an answer in a search tree; `prior`: p(a | s) of the block that led to it."""

    path: Path
    prior: float = 1.0
    visits: int = 0
    total: float = 0.0
    children: list[Node] = field(default_factory=list)

    def descend(self, c_puct: float) -> list[Node]:
        """The way to a node without children."""
        way: list[Node] = [self]
        while way[-1].children:
            parent = way[-1]
            way.append(max(parent.children, key=lambda child: child.score(parent.visits, c_puct)))
        return way

    def score(self, visits: int, c_puct: float) -> float:
        """Its Q, before the first visit the critic's value, and what its prior allows for exploring."""
        quality = self.total / self.visits if self.visits else self.path.value
        return quality + c_puct * self.prior * sqrt(visits) / (1 + self.visits)

    def expand(self, paths: Sequence[Path]) -> None:
        """Give it children, equal paths one."""
        counts = Counter(path.ids for path in paths)
        self.children = [Node(path, counts[ids] / len(paths)) for ids, path in {p.ids: p for p in paths}.items()]

    def mean_of_children(self) -> float:
        """Σ p V over its children; its own value where it has none."""
        return sum(c.prior * c.path.value for c in self.children) if self.children else self.path.value
