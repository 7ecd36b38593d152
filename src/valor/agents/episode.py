"""An episode: a prompt, and turns of the policy with observations between them.

A single answer is an episode of one turn. Token ids are exactly those that the engine sampled or got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, repeat
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from valor.algorithms import place_at_end
from valor.data.batch import Batch, Episodes, pad_rows, unpadded
from valor.data.images import IMAGES
from valor.models.routing import ROUTES
from valor.rollout.base import FinishReason, Output, Span, spans_of, token_versions
from valor.tracking.metrics import summarize

EpisodeKey = tuple[int, ...]
"""(run seed, step, number of the sample in the step): names an episode and decides its random numbers."""

TOKEN_COLUMNS = ("responses", "response_mask", "rollout_log_probs", "turn_ids", "weights_versions", "turn_rewards")
"""Columns [R, T] of `episode_rows`."""

Decode = Callable[[list[list[int]]], list[str]]

EpisodeEnd = FinishReason | Literal["turns"]
"""stop: it came to its end; length, turns: cut off by a limit on tokens or turns; abort: it failed."""


class EpisodeFailed(RuntimeError):
    """Its tools, its environment or its program did not play an episode to the end."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the policy.

    `token_ids` and `log_probs` [n] are those of the sampled tokens; `spans` say which version of the weights sampled
    how many of them. `observation_ids` are the tokens between the previous turn and this one. `prompt_ids`: the turn
    begins a row of its own, with this prompt, because the chat template rewrites history. `reward`: the environment's
    for the turn. `images`: those of its row so far, as `valor.data.images.IMAGES` has them; None in a run on text.
    `routes`: of a single answer, as an Output has them.
    """

    token_ids: Sequence[int]
    log_probs: Sequence[float]
    spans: tuple[Span, ...]
    observation_ids: Sequence[int] = ()
    prompt_ids: Sequence[int] | None = None
    reward: float = 0.0
    images: str | None = None
    routes: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Episode:
    """Turns of one conversation, and why the last one ended.

    `prompt_ids`: of the first row; None: the task's prompt. `outcome`: the environment's score of the episode; None:
    graders judge. `info`: calls and counters, for metrics and reports. `error`: why it could not be played. `text`,
    `turn_texts`: the response, and the policy's text in each turn, where `turns` are left out.
    """

    key: EpisodeKey
    turns: tuple[Turn, ...]
    finish_reason: EpisodeEnd
    prompt_ids: Sequence[int] | None = None
    outcome: float | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    text: str | None = None
    turn_texts: Sequence[str] | None = None

    @classmethod
    def of_one_turn(cls, key: EpisodeKey, output: Output) -> Episode:
        """The answer to a prompt."""
        turn = Turn(output.token_ids, output.log_probs, output.spans, routes=output.routes)
        return cls(key, (turn,), output.finish_reason)

    @property
    def response_ids(self) -> list[int]:
        """All tokens after the first prompt, but the prompts of later rows."""
        return [*chain.from_iterable((*turn.observation_ids, *turn.token_ids) for turn in self.turns)]

    def turn_texts_by(self, decode: Decode) -> Sequence[str] | None:
        """The policy's text in each turn; None of a single answer."""
        if self.turn_texts is not None or self.prompt_ids is None:
            return self.turn_texts
        turns = {number: turn.token_ids for number, turn in enumerate(self.turns, 1) if turn.token_ids}
        return turn_texts(turns, self.info, decode)

    @property
    def rows(self) -> list[range]:
        """Which turns (from 0) each row holds."""
        starts = [0, *(i for i, turn in enumerate(self.turns) if i and turn.prompt_ids is not None)]
        return [range(*pair) for pair in zip(starts, [*starts[1:], len(self.turns)], strict=True)]


def turns_of(
    ids: Sequence[int],
    numbers: Sequence[int],
    log_probs: Sequence[float],
    versions: Sequence[int],
    rewards: Sequence[float],
    prompt_ids: Sequence[int] | None,
    images: str | None = None,
) -> list[Turn]:
    """The turns of a row whose tokens have the number of their turn, 0 in observations, and the reward of a turn on its
    last token. An observation behind the last one is a turn without tokens of the policy."""
    turns, observation = list[Turn](), ids[:0]
    for number, group in groupby(range(len(ids)), numbers.__getitem__):
        positions = [*group]
        part = slice(positions[0], positions[-1] + 1)
        if not number:
            observation = ids[part]
            continue
        spans, reward = spans_of(versions[part]), rewards[positions[-1]]
        turns.append(Turn(ids[part], log_probs[part], spans, observation, prompt_ids, reward, images))
        observation, prompt_ids = ids[:0], None
    return [*turns, Turn([], [], (), observation, prompt_ids, images=images)] if observation or not turns else turns


def episode_rows(episodes: Sequence[Episode]) -> Batch:
    """The rows of the episodes, right-padded with zeros to T tokens after the prompt.

    `responses` [R, T], `response_lengths` [R]; and, 0 on observations and padding: `response_mask` [R, T] (1: sampled
    by the policy), `rollout_log_probs` [R, T], `turn_ids` [R, T] (number of the token's turn, counted from 1 through
    the episode), `weights_versions` [R, T] (which weights sampled the token). `is_finite` [R]: whether all log-probs of
    the row are. `routes`, where the engine records them (`valor.models.routing.ROUTES`). Objects: `finish_reason`.

    Episodes of loops, which bring their own prompts, have also `prompts`, `prompt_lengths`, `turn_rewards` [R, T] (on
    the last token of each turn), `episode` [R] (number of the row's episode here), and objects `outcome`,
    `episode_info`, `episode_error`, and `images` in a run with images.
    """
    rows = [
        (number, [(i, episode.turns[i]) for i in turns])
        for number, episode in enumerate(episodes)
        for turns in episode.rows
    ]

    def columns(column_of: Callable[[Turn, int], Sequence[float]], dtype: torch.dtype) -> Tensor:
        """[R, T]: numbers of the turns' tokens, 0 on observations."""
        parts = (((*repeat(0, len(t.observation_ids)), *column_of(t, i)) for i, t in turns) for _, turns in rows)
        return pad_rows([[*chain.from_iterable(part)] for part in parts], dtype)[0]

    tokens = (((*turn.observation_ids, *turn.token_ids) for _, turn in turns) for _, turns in rows)
    padded, lengths = pad_rows([[*chain.from_iterable(parts)] for parts in tokens], torch.long)
    turn_ids = columns(lambda turn, i: [i + 1] * len(turn.token_ids), torch.long)
    log_probs = columns(lambda turn, i: turn.log_probs, torch.float32)
    batch = Batch(
        {
            "responses": padded,
            "response_lengths": lengths,
            "response_mask": (turn_ids > 0).float(),
            "rollout_log_probs": log_probs,
            "is_finite": log_probs.isfinite().all(-1),
            "turn_ids": turn_ids,
            "weights_versions": columns(lambda turn, i: token_versions(turn.spans), torch.long),
        },
        {"finish_reason": [episodes[number].finish_reason for number, _ in rows]},
    )
    routes = [turns[0][1].routes if turns else None for _, turns in rows]
    if (known := next((of_row for of_row in routes if of_row is not None), None)) is not None:
        parts = [known[:0] if of_row is None else of_row for of_row in routes]
        batch[ROUTES] = pad_sequence([part.flatten() for part in parts], batch_first=True)
    if all(episode.prompt_ids is None for episode in episodes):
        return batch
    images = [turns[-1][1].images for _, turns in rows]
    if any(of_row is not None for of_row in images):
        batch.objects[IMAGES] = [of_row or "" for of_row in images]
    prompts = [turns[0][1].prompt_ids or episodes[number].prompt_ids for number, turns in rows]
    batch["prompts"], batch["prompt_lengths"] = pad_rows([prompt or () for prompt in prompts], torch.long)
    batch["turn_rewards"] = columns(  # a turn that said nothing has none
        lambda turn, i: [*repeat(0.0, len(turn.token_ids) - 1), turn.reward][: len(turn.token_ids)], torch.float32
    )
    batch["episode"] = torch.tensor([number for number, _ in rows])
    batch.objects |= {
        "outcome": [episodes[number].outcome for number, _ in rows],
        "episode_info": [episodes[number].info for number, _ in rows],
        "episode_error": [episodes[number].error for number, _ in rows],
    }
    return batch


def with_text(rows: Batch, decode: Decode) -> Batch:
    """Adds `response_text` where it is missing, and to rows of loops `turn_texts`, the policy's in each turn."""
    by_turns = "episode_info" in rows and "turn_texts" not in rows
    if "response_text" in rows and not by_turns:
        return rows
    responses = unpadded(rows, "response")
    if "response_text" not in rows:
        rows.objects["response_text"] = decode(responses)
    if by_turns:
        infos, numbers = rows.objects["episode_info"], rows["turn_ids"].tolist()
        rows.objects["turn_texts"] = [
            turn_texts({number: ids for number, _, ids in turn_tokens(row, row_numbers)}, info, decode)
            for row, row_numbers, info in zip(responses, numbers, infos, strict=True)
        ]
    return rows


def turn_tokens(ids: Sequence[int], numbers: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Of each turn in a row: its number, the position of its first token, and its token ids."""
    groups = (list(group) for number, group in groupby(range(len(ids)), numbers.__getitem__) if number)
    return [(numbers[group[0]], group[0], [ids[i] for i in group]) for group in groups]


def turn_texts(turns: Mapping[int, Sequence[int]], info: Mapping[str, Any], decode: Decode) -> list[str]:
    """What graders read of turns, by number: their tokens' text, or, where it had calls, the loop's text without."""
    said = info.get("said", {})
    texts = decode([list(ids) for ids in turns.values()]) if turns else []
    return [said.get(str(number), text) for number, text in zip(turns, texts, strict=True)]


def own_words(batch: Batch) -> list[str]:
    """The policy's text in each episode of a batch by `last_rows`, a line break between turns."""
    turns = batch.objects.get("turn_texts")
    return batch.objects["response_text"] if turns is None else ["\n".join(texts) for texts in turns]


def last_rows(batch: Batch) -> Batch:
    """The last row of each episode, with the text and the length of all its rows."""
    rows = Episodes(batch).rows
    if len(rows) == len(batch):
        return batch
    ends = batch.take([numbers[-1] for numbers in rows])
    texts, lengths = batch.objects["response_text"], batch["response_lengths"]
    ends.objects["response_text"] = ["".join(texts[i] for i in numbers) for numbers in rows]
    if "turn_texts" in batch:
        by_row = batch.objects["turn_texts"]
        ends.objects["turn_texts"] = [[text for i in numbers for text in by_row[i]] for numbers in rows]
    ends["response_lengths"] = torch.stack([lengths[numbers].sum() for numbers in rows])
    if "turn_rewards" in batch:
        ends["turn_rewards"] = turn_rewards(batch)[:, None]
    return ends


def turn_rewards(batch: Batch) -> Tensor:
    """[E]: the sum of each episode's turn rewards."""
    episodes = Episodes(batch)
    return episodes.sums(batch["turn_rewards"]) if "turn_rewards" in batch else torch.zeros(len(episodes.rows))


def place_rewards(scores: Tensor, batch: Batch, *, at_end: bool = False) -> Tensor:
    """Rewards of tokens [R, T] that add up to the episodes' scores [E]: `step_rewards` [R, T] where they are, the rest
    (`at_end`: all) on the last policy token of the episode."""
    if "episode" not in batch and "step_rewards" not in batch:
        return place_at_end(scores, batch["response_mask"])
    episodes, mask = Episodes(batch), batch["response_mask"]
    steps = None if at_end else batch.tensors.get("step_rewards")
    rest = scores if steps is None else scores - episodes.sums(steps)
    placed = episodes.part(place_at_end(rest, episodes.join(mask)))
    return placed if steps is None else placed + steps * mask


def episode_metrics(batch: Batch) -> dict[str, Any]:
    """`episode/*` where agents play, per episode: turns, rows, tool calls and errors, seconds of tools, tokens."""
    if "episode" not in batch:
        return {}
    rows = Episodes(batch).rows
    firsts, lasts, count = [numbers[0] for numbers in rows], [numbers[-1] for numbers in rows], max(len(rows), 1)
    infos = [batch.objects["episode_info"][row] for row in firsts]
    calls = [call for info in infos for call in info.get("calls", ())]
    errors = [call["error"] for call in calls if call["error"] is not None]
    ends = [batch.objects["finish_reason"][row] for row in firsts]
    policy_tokens = batch["response_mask"].sum()
    asides = [info.get("sub_agents", ()) for info in infos]
    cuts = [cut for info in infos for cut in info.get("compactions", ())]
    compactions = {"compactions": len(cuts), "compacted_tokens": sum(cut["tokens"] for cut in cuts)}
    sums = {
        "rows": len(batch),
        "cut_off": sum(end in ("length", "turns") for end in ends),
        "failed": ends.count("abort"),
        "policy_tokens": float(policy_tokens),
        "observation_tokens": float(batch["response_lengths"].sum() - policy_tokens),
        **(compactions if any("compactions" in info for info in infos) else {}),
        **({"sub_agents": sum(map(len, asides))} if any(asides) else {}),
        "tool_calls": len(calls),
        "tool_errors": len(errors),
        "tool_seconds": sum(call["seconds"] for call in calls),
        **{f"tool_errors/{kind}": errors.count(kind) for kind in sorted(set(errors))},
    }
    turns = summarize("episode/turns", batch["turn_ids"].amax(1)[lasts].float())
    return turns | {f"episode/{name}": total / count for name, total in sums.items()}
