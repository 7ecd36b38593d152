"""Search with a critic over beginnings of answers: beams over blocks, and Monte-Carlo trees.

`valor critic search` chooses among whole answers; these two go on from what they have chosen. Both take a
`valor.lab.search.Searcher`, which samples, reads values and counts the tokens of both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt

from valor.lab.search import Path, Searcher


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
