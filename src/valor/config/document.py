"""The keys as text: `valor config keys` and docs/configuration.md, from the schema and the table of spellings."""

import inspect

from pydantic import BaseModel

from valor.config.critic_runs import CriticPretrainConfig, CriticScoreConfig
from valor.config.describe import default_text, show, type_text
from valor.config.mistakes import unknown_key
from valor.config.ppo import PPOConfig
from valor.config.presets import PRESETS
from valor.config.rules import unavailable_values
from valor.config.supervised import RMConfig, SFTConfig
from valor.config.tree import Key, plain_keys, schema
from valor.config.verl import SPELLINGS
from valor.errors import UserError


def describe_keys(prefix: str = "", root: type[BaseModel] = PPOConfig) -> str:
    """A line per key below `prefix`: key, type, default, meaning. UserError: nothing has that prefix."""
    below = prefix and f"{prefix.removesuffix('.')}."
    keys = [key for key in plain_keys(root) if key.name == prefix or key.name.startswith(below)]
    if not keys:
        raise UserError(unknown_key(root, prefix))
    rows = [(key.name, _compact(type_text(key)), default_text(key)) for key in keys]
    widths = [
        min(max(map(len, column)), limit) for column, limit in zip(zip(*rows, strict=True), (80, 34, 48), strict=True)
    ]
    return "\n".join(
        "  ".join([*map(str.ljust, row, widths), key.info.description or ""]).rstrip()
        for row, key in zip(rows, keys, strict=True)
    )


def _compact(text: str) -> str:
    """Choices as `a|b|c`, to keep the columns narrow."""
    return text.replace("one of ", "").replace("any of ", "").replace(", ", "|")


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
        parts += [_section_docs(root, key) for key in schema(root).values() if key.section is not None]
    parts.append("## Critics alone (`valor critic pretrain`, `valor critic score`)\n")
    parts.append("The keys of `valor ppo` (`trainer.total_epochs` is 4 in pre-training), and a section each.\n")
    parts.append(_section_docs(CriticPretrainConfig, schema(CriticPretrainConfig)["pretrain"]))
    parts.append(_section_docs(CriticScoreConfig, schema(CriticScoreConfig)["score"]))
    parts += [_unavailable_docs(), _spelling_docs()]
    return "\n".join(filter(None, parts)).rstrip() + "\n"


def _preset_docs() -> str:
    lines = ["## Named configurations\n", "`ppo_trainer`, `sft_trainer` and `rm_trainer` hold the defaults.\n"]
    for name, (_, flat) in PRESETS.items():
        settings = ", ".join(f"`{key}={show(value)}`" for key, value in flat.items())
        lines.append(f"- `{name}`: {settings}")
    return "\n".join(lines) + "\n"


def _section_docs(root: type[BaseModel], section: Key) -> str:
    """The section's own keys, "" where it has none."""
    keys = [key for key in plain_keys(root) if key.name.rpartition(".")[0] == section.name]
    title = [f"### `{section.name}`\n", inspect.getdoc(section.section) or "", ""]
    table = ["| key | type | default | |", "|---|---|---|---|"]
    for key in keys:
        doc = (key.info.description or "").replace("|", "\\|")
        table.append(f"| `{key.name.rpartition('.')[2]}` | {type_text(key)} | `{default_text(key)}` | {doc} |")
    return "\n".join([*title, *table]) + "\n" if keys else ""


def _unavailable_docs() -> str:
    asked = {(one.pattern, one.unavailable): None for one in SPELLINGS if one.unavailable is not None}
    for root in (PPOConfig, SFTConfig):
        asked |= {(key.name, one): None for key in plain_keys(root) for one in unavailable_values(key)}
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
