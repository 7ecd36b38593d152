"""Sample generations as assets/macros.html shows them: facts, turns, calls, and tokens with colours and numbers.

A token's style has its share of the deepest colour for each signal: `--g` (advantages above 0) and `--b` (below), `--v`
(values), `--s` (surprise), `--t` (nats by which the teacher finds it less likely than the policy does), `--m` (more
likely). Values are scaled over the run, all else by step, so that colours compare.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from valor.report.skeleton import short

_SIGNALS = {"advantages": "Advantage", "values": "Value", "log_probs": "Surprise", "teacher_gaps": "Teacher"}
_NUMBERS = {
    **{"advantage": "advantages", "value": "values", "return": "returns", "log-prob": "log_probs"},
    **{"teacher's log-prob": "teacher_log_probs", "log-prob minus teacher's": "teacher_gaps"},
}
_PART: dict[str, Any] = {"prompt": None, "rewritten": "", "title": "", "told": False, "calls": []}
_ENDS = {"stop": "itself", "length": "the limit on tokens", "turns": "the limit on turns", "abort": "an error"}


def sample_groups(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups of `read_samples` with their samples as `cards`."""
    groups = [{**group, "records": [_with_gaps(record) for record in group["records"]]} for group in groups]
    records = [record for group in groups for record in group["records"]]
    values = [v for r in records if r.get("values") for v in (*r["values"], r["reward"]) if v is not None]
    bounds = (min(values), max(values)) if values else (0.0, 1.0)
    shown = []
    for group in groups:
        reach = {name: _reach(group["records"], name) for name in ("advantages", "log_probs", "teacher_gaps")}
        shown.append({**group, "cards": [_card(record, reach, bounds) for record in group["records"]]})
    return shown


def signals(groups: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What tokens of the groups of `sample_groups` can be coloured by, with its label."""
    records = [record for group in groups for record in group["records"]]
    return {name: label for name, label in _SIGNALS.items() if any(record.get(name) for record in records)}


def _with_gaps(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """With `teacher_gaps`, log π − log ν of each token in nats, where a teacher has scored it."""
    if not record.get("teacher_log_probs"):
        return record
    pairs = zip(record["log_probs"], record["teacher_log_probs"], strict=True)
    return {**record, "teacher_gaps": [None if None in pair else pair[0] - pair[1] for pair in pairs]}


def _reach(records: Sequence[Mapping[str, Any]], name: str) -> float:
    """98 of 100 numbers are below it: one outlier would leave the rest blank. 0 where none was recorded."""
    sizes = sorted(abs(number) for record in records for number in record.get(name) or () if number is not None)
    return (sizes[int(0.98 * (len(sizes) - 1))] or 1.0) if sizes else 0.0


def _card(record: Mapping[str, Any], reach: Mapping[str, float], bounds: tuple[float, float]) -> dict[str, Any]:
    tokens = [_token(record, i, reach, bounds) for i in range(len(record["tokens"]))]
    parts = _parts(record, tokens) if record.get("episode") else [_PART | {"tokens": tokens}]
    left_out = record.get("tokens_left_out", 0)
    return {
        "facts": list(_facts(record)),
        "prompt": record["prompt"],
        "parts": parts,
        "left_out": left_out,
        "images": record.get("images"),
    }


def _facts(record: Mapping[str, Any]) -> Any:
    """(label, value) of what is known of the response."""
    episode, end = record.get("episode") or {}, record.get("finish_reason")
    calls = episode.get("calls", ())
    facts = {
        "reward": record["reward"],
        "expected": record.get("ground_truth"),
        "ended by": _ENDS.get(end, end) if isinstance(end, str) else None,
        "tokens": len(record["tokens"]) + record.get("tokens_left_out", 0),
        "turns": len(episode.get("turn_rewards", ())) or None,
        "tool calls": len(calls) or None,
        "tool errors": sum(bool(call.get("error")) for call in calls) or None,
        "environment's outcome": episode.get("outcome"),
        "could not be played": episode.get("error"),
        "": record.get("data_source"),
        **(record.get("reward_info") or {}),
    }
    for label, fact in facts.items():
        if fact not in (None, ""):
            text = short(fact) if isinstance(fact, float) else fact if isinstance(fact, str) else json.dumps(fact)
            yield label, text


def _token(
    record: Mapping[str, Any], i: int, reach: Mapping[str, float], bounds: tuple[float, float]
) -> dict[str, str]:
    numbers = {label: (record.get(name) or {i: None})[i] for label, name in _NUMBERS.items()}
    is_own = not record.get("mask") or bool(record["mask"][i])
    lines = [f"token {i + 1}: {json.dumps(record['tokens'][i], ensure_ascii=False)}"]
    lines += [f"{label} {short(number)}" for label, number in numbers.items() if number is not None]
    lines += [] if is_own else ["not written by the policy"]
    shares = {}
    if is_own and (advantage := numbers["advantage"]) is not None:
        shares["--b" if advantage < 0 else "--g"] = abs(advantage) / reach["advantages"]
    if is_own and (value := numbers["value"]) is not None:
        shares["--v"] = (value - bounds[0]) / ((bounds[1] - bounds[0]) or 1.0)
    if is_own and (log_prob := numbers["log-prob"]) is not None:
        shares["--s"] = -log_prob / reach["log_probs"]
    if is_own and (gap := numbers["log-prob minus teacher's"]) is not None:
        shares["--t" if gap > 0 else "--m"] = abs(gap) / reach["teacher_gaps"]
    style = ";".join(f"{name}:{min(max(share, 0.0), 1.0):.2f}" for name, share in shares.items())
    text = record["tokens"][i].replace("\n", "↵\n").replace("\t", "⇥\t")
    return {"text": text, "title": "\n".join(lines), "style": style}


def _parts(record: Mapping[str, Any], tokens: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """An episode's tokens by turn and row, each turn of the policy with its calls."""
    episode, turns, parts, last = record["episode"], record["turns"], [], 0
    prompts = {row["at"]: row["prompt"] for row in episode["rows"]}
    cuts = {cut["turn"]: cut["tokens"] for cut in episode.get("compactions", ())}
    for (turn, _), group in groupby(range(len(tokens)), lambda i: (turns[i], sum(at <= i for at in prompts))):
        indices = list(group)
        part = _PART | {"tokens": [tokens[i] for i in indices], "prompt": prompts.get(indices[0])}
        part["rewritten"] = "The chat template has rewritten what came before"
        if last in cuts:
            part["rewritten"] = f"Cut here, {cuts[last]} tokens shorter: the policy goes on from its summary"
        if turn:
            rewards = episode["turn_rewards"]
            reward = rewards[turn - 1] if turn <= len(rewards) else None
            title = f"policy, turn {turn}" + (", its summary" if turn in cuts else "")
            part["title"] = title + (f" · reward {short(reward)}" if reward else "")
            part["calls"] = [_call(call) for call in episode["calls"] if call["turn"] == turn and turn != last]
            last = turn
        else:
            who = "tool" if any(call["turn"] == last for call in episode["calls"]) else "environment"
            part |= {"title": f"{who}, {len(indices)} tokens as the policy reads them", "told": True}
        parts.append(part)
    return parts


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    arguments, seconds = call["arguments"], call["seconds"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    facts = [f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"]
    facts += [f"reward {short(call['reward'])}"] if call.get("reward") else []
    facts += [f"error: {call['error']}"] if call.get("error") else []
    shown = {"text": f"{call['name'] or 'no call'}({text})", "facts": " · ".join(facts)}
    return {**shown, "result": call["text"], "error": call.get("error")}
