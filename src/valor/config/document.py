"""The keys as text: `valor config keys` and docs/configuration.md, from the schema and the table of spellings."""

from __future__ import annotations

import inspect

from pydantic import BaseModel

from valor.config.critic_runs import CriticPretrainConfig, CriticScoreConfig, PretrainConfig, ScoreConfig
from valor.config.describe import default_text, show, type_text
from valor.config.mistakes import unknown_key
from valor.config.ppo import PPOConfig
from valor.config.presets import PRESETS
from valor.config.rules import unavailable_values
from valor.config.supervised import RMConfig, SFTConfig
from valor.config.tree import find_field, section_type, walk_keys
from valor.config.verl import SPELLINGS
from valor.errors import UserError


def describe_keys(prefix: str = "", root: type[BaseModel] = PPOConfig) -> str:
    """A line per key below `prefix`: key, type, default, meaning. UserError: nothing has that prefix."""
    rows = [
        (
            key,
            _compact(type_text(section, name)),
            default_text(section, name, key),
            section.model_fields[name].description or "",
        )
        for key, section, name in walk_keys(root)
        if not prefix or key == prefix or key.startswith(prefix if prefix.endswith(".") else f"{prefix}.")
    ]
    if not rows:
        raise UserError(unknown_key(root, prefix))
    widths = [min(max(len(row[column]) for row in rows), limit) for column, limit in ((0, 80), (1, 34), (2, 48))]
    return "\n".join(_aligned(row, widths) for row in rows)


def _compact(text: str) -> str:
    """Choices as `a|b|c`, to keep the columns narrow."""
    return text.replace("one of ", "").replace("any of ", "").replace(", ", "|")


def _aligned(row: tuple[str, str, str, str], widths: list[int]) -> str:
    cells = [cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)]
    return "  ".join([*cells, row[3]]).rstrip()


_DOC_HEAD = """\
# Configuration keys

<!-- Made from the schema in src/valor/config: python -m valor.config > docs/configuration.md -->

`valor ppo key=value ...`, `valor sft key=value ...`, `valor rm train key=value ...` set these keys; `valor critic
pretrain` and `valor critic score` take the first's and a section of their own. `valor config keys [PREFIX]` lists
them. The grammar is Hydra's: numbers, `true`/`false`, `null`, `[lists]`, `{dicts}`, `'quoted text'`; a plain `+` or
`++` before a key is allowed and changes nothing; `~key` goes back to the default; `-m key=1,2,3` runs each value in
turn. `--config-name NAME` starts from a named configuration or, with `--config-path DIR`, from `DIR/NAME.yaml`, which
may begin with `defaults: [ppo_trainer, _self_]`. `--dry-run` prints the plan of the run and stops.

A default written as `= key` is inherited: null takes the value of that key. Sizes are counted in prompts, samples
(prompts times `actor_rollout_ref.rollout.n`) or tokens, as each key says.
"""


def render_docs() -> str:
    """The text of docs/configuration.md."""
    parts = [_DOC_HEAD, _preset_docs()]
    trees = {
        "PPO and its relatives (`valor ppo`)": PPOConfig,
        "Supervised (`valor sft`)": SFTConfig,
        "Reward models (`valor rm train`)": RMConfig,
    }
    for title, root in trees.items():
        parts.append(f"## {title}\n")
        parts += [_section_docs(root, prefix, section) for prefix, section in _sections(root)]
    parts.append("## Critics alone (`valor critic pretrain`, `valor critic score`)\n")
    parts.append("The keys of `valor ppo` (`trainer.total_epochs` is 4 in pre-training), and a section each.\n")
    parts.append(_section_docs(CriticPretrainConfig, "pretrain", PretrainConfig))
    parts.append(_section_docs(CriticScoreConfig, "score", ScoreConfig))
    parts += [_unavailable_docs(), _spelling_docs()]
    return "\n".join(parts).rstrip() + "\n"


def _preset_docs() -> str:
    lines = ["## Named configurations\n", "`ppo_trainer`, `sft_trainer` and `rm_trainer` hold the defaults.\n"]
    for name, (_, flat) in PRESETS.items():
        settings = ", ".join(f"`{key}={show(value)}`" for key, value in flat.items())
        lines.append(f"- `{name}`: {settings}")
    return "\n".join(lines) + "\n"


def _sections(root: type[BaseModel], prefix: str = "") -> list[tuple[str, type[BaseModel]]]:
    """Every section that has plain keys of its own, outer ones first."""
    found: list[tuple[str, type[BaseModel]]] = []
    for name in root.model_fields:
        section = section_type(root, name)
        if section is not None:
            found += [(f"{prefix}{name}", section), *_sections(section, f"{prefix}{name}.")]
    return [item for item in found if any(section_type(item[1], name) is None for name in item[1].model_fields)]


def _section_docs(root: type[BaseModel], prefix: str, section: type[BaseModel]) -> str:
    found = find_field(root, prefix)
    assert found is not None
    lines = [f"### `{prefix}`\n", inspect.getdoc(section) or "", "", "| key | type | default | |", "|---|---|---|---|"]
    for name in section.model_fields:
        if section_type(section, name) is None:
            cells = (type_text(section, name), f"`{default_text(section, name, f'{prefix}.{name}')}`")
            doc = (section.model_fields[name].description or "").replace("|", "\\|")
            lines.append(f"| `{name}` | {cells[0]} | {cells[1]} | {doc} |")
    return "\n".join(lines) + "\n"


def _unavailable_docs() -> str:
    asked = {(one.pattern, one.unavailable): None for one in SPELLINGS if one.unavailable is not None}
    for root in (PPOConfig, SFTConfig):
        for key, section, name in walk_keys(root):
            asked |= {(key, one): None for one in unavailable_values(section, name)}
    lines = ["## Not available in this version\n", "| key | what it asks for | instead |", "|---|---|---|"]
    lines += [f"| `{key}` | {one.what} | {one.instead} |" for key, one in sorted(asked, key=lambda item: item[0])]
    return "\n".join(lines) + "\n"


def _spelling_docs() -> str:
    lines = ["## Other spellings from verl\n", "`*` stands for any rest of a key.\n", "| key | |", "|---|---|"]
    for one in SPELLINGS:
        meant = one.target or one.value
        if meant is not None:
            what = f"read as `{meant}`" + (f"; {one.reason}" if one.reason else "")
        else:
            what = f"{'refused' if one.refused else 'no effect'}: {one.reason}"
            what += f" (see above: {one.unavailable.what})" if one.unavailable is not None else ""
        only = f" with {' or '.join(f'`{value}`' for value in one.only)}" if one.only else ""
        lines.append(f"| `{one.pattern}`{only} | {what} |")
    return "\n".join(lines) + "\n"
