"""`python benchmarks/config_docs.py > docs/configuration.md`: every key, from the schema and the table of spellings."""

import inspect
from collections.abc import Iterable, Sequence

from valor.config.critic_runs import CriticPretrainConfig, CriticScoreConfig, CriticSearchConfig
from valor.config.describe import key_row, show
from valor.config.evaluation import EvalConfig
from valor.config.ppo import PPOConfig
from valor.config.presets import PRESETS
from valor.config.supervised import RMConfig, SFTConfig
from valor.config.tree import schema
from valor.config.verl import SPELLINGS, Spelling

_DOC_HEAD = """\
# Configuration keys

<!-- Made from the schema in src/valor/config: python benchmarks/config_docs.py > docs/configuration.md -->

`valor ppo key=value ...`, `valor sft key=value ...`, `valor rm train key=value ...` set these keys;
`valor config keys [PREFIX]` lists them. The grammar is Hydra's: numbers, `true`/`false`, `null`, `[lists]`, `{dicts}`,
`'quoted text'`; a plain `+` or `++` before a key is allowed and changes nothing; `~key` goes back to the default;
several runs are a sweep ([the lab](lab.md)). `--config-name NAME` starts from a named configuration or, with
`--config-path DIR`, from `DIR/NAME.yaml`, which may begin with `defaults: [ppo_trainer, _self_]`. `--dry-run` prints
the plan of the run and stops.

A default written as `= key` is inherited: null takes the value of that key. Sizes are counted in prompts, samples
(prompts times `actor_rollout_ref.rollout.n`) or tokens, as each key says.
"""

_TREES = (
    ("PPO and its relatives (`valor ppo`)", PPOConfig, ""),
    ("Supervised (`valor sft`)", SFTConfig, ""),
    ("Reward models (`valor rm train`)", RMConfig, ""),
    ("Critics alone: `valor critic pretrain`, besides the keys of `valor ppo`", CriticPretrainConfig, "pretrain"),
    ("Critics alone: `valor critic score`, besides the keys of `valor ppo`", CriticScoreConfig, "score"),
    ("Evaluation: `valor eval`, besides the keys of `valor ppo`", EvalConfig, "eval"),
    ("Search with a critic: `valor critic search`, besides the keys of `valor ppo`", CriticSearchConfig, "search"),
)


def render_docs() -> str:
    """The text of docs/configuration.md."""
    parts = [_DOC_HEAD, "## Named configurations\n", "`ppo_trainer`, `sft_trainer`, `rm_trainer` hold the defaults.\n"]
    for name, (_, flat) in PRESETS.items():
        parts.append(f"- `{name}`: " + ", ".join(f"`{key}={show(value)}`" for key, value in flat.items()))
    for title, root, below in _TREES:
        keys = [key for key in schema(root).values() if key.name.startswith(below)]
        parts += [
            f"\n## {title}\n",
            _table(
                ["key", "type", "default", ""],
                [
                    (key.name, "", "", f"**{inspect.getdoc(key.section)}**") if key.section else key_row(key)
                    for key in keys
                ],
            ),
        ]
    parts += ["\n## Other spellings from verl\n", "`*` stands for any rest of a key.\n"]
    parts.append(_table(["key", ""], map(_spelling, SPELLINGS)))
    return "\n".join(parts) + "\n"


def _table(head: list[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, *cells in rows:
        lines.append(f"| `{name}` | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def _spelling(one: Spelling) -> tuple[str, str]:
    """What a rule is about and what it does."""
    at = f"={one.value}" if one.value else ""
    what = f"read as `{one.target}{at}`" if one.target else "refused" if one.refused else "no effect"
    what += f": {one.reason}" if one.reason else ""
    return one.pattern, f"with {' or '.join(f'`{value}`' for value in one.only)}: {what}" if one.only else what


if __name__ == "__main__":
    print(render_docs(), end="")
