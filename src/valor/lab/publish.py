"""`valor critic publish`: a critic as a plain Hugging Face directory with a model card that carries its scorecard."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

import click
import yaml
from jinja2 import Template

from valor.arguments import PATH, command, option
from valor.config.tree import get_at
from valor.errors import UserError
from valor.report.scorecard_page import main_numbers
from valor.report.skeleton import short

SCORECARD_FILES = ("scorecard.json", "scorecard.html")
CARD_FILE = "README.md"


@command("critic publish", "valor critic publish runs/demo/ppo/huggingface/critic my-critic", "critic")
@click.argument("critic", type=PATH)
@click.argument("out", type=PATH)
@option("--scorecard", type=PATH, metavar="DIR", help="What valor critic score left of it.")
def main(critic: Path, out: Path, scorecard: Path | None) -> int:
    """Write a critic as a model with its card to the new folder OUT.

    CRITIC: a global_step_N folder, or a Hugging Face directory of a critic.
    """
    publish(critic, out, scorecard)
    print(out)
    return 0


def publish(critic: Path, out: Path, scorecard: Path | None = None) -> None:
    """Write the model, its tokenizer, README.md and the scorecard's files to `out`.

    What the card says of the training comes from the run's folder in which `critic` lies, if it lies in one. UserError:
    `critic` is none, `out` is not empty, or the scorecard is another critic's; nothing is left behind then.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f"'{out}' is not empty: give a new folder")
    card = _read_scorecard(scorecard) if scorecard else None
    checkpoint = (critic / "trainer.json").is_file()
    if checkpoint:
        from valor.trainer.export import export_checkpoint

        export_checkpoint(critic, out, "critic")
    else:
        _check_critic(critic)
        shutil.copytree(critic, out, ignore=shutil.ignore_patterns(CARD_FILE, *SCORECARD_FILES), dirs_exist_ok=True)
    if card is not None and card["weights"] not in (None, fingerprint(out)):
        shutil.rmtree(out)
        raise UserError(
            f"'{scorecard}' is the scorecard of other weights ({card['critic']}): run valor critic score with "
            f"critic.model.path={critic}, then publish"
        )
    if scorecard is not None:
        for name in SCORECARD_FILES:
            shutil.copy(scorecard / name, out / name)
    run = critic.parent if checkpoint else critic.parent.parent
    training = dict(_training(run)) if (run / "config.yaml").is_file() else {}
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    (out / CARD_FILE).write_text(model_card(out.resolve().name, config, training, card), encoding="utf-8")


def model_card(
    name: str, config: Mapping[str, Any], training: Mapping[str, str], scorecard: Mapping[str, Any] | None
) -> str:
    """Markdown: what it is, how it was trained and scored, how to use it. `config`: the model's config.json."""
    text = resources.files("valor.lab").joinpath("model_card.md").read_text(encoding="utf-8")
    template = Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    # transformers writes the number of labels as their names, and leaves out its default of two.
    labels = len(config.get("id2label", "01"))
    numbers = list(main_numbers(scorecard)) if scorecard else []
    if scorecard:
        half = next(one for one in scorecard["positions"] if one["at"] == 0.5)
        numbers.append(("AUC at half of the answer", short(half["auc"]), ""))
    return template.render(name=name, config=config, labels=labels, training=training, card=scorecard, numbers=numbers)


def fingerprint(model: Path) -> str | None:
    """SHA-256 over the weight files of a model directory; None where it is no local directory."""
    if not model.is_dir():
        return None
    digest = hashlib.sha256()
    for path in sorted(model.glob("*.safetensors")):
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _read_scorecard(folder: Path) -> dict[str, Any]:
    missing = [name for name in SCORECARD_FILES if not (folder / name).is_file()]
    if missing:
        raise UserError(f"'{folder}' has no {missing[0]}: give the folder that valor critic score wrote (score.out)")
    return json.loads((folder / SCORECARD_FILES[0]).read_text(encoding="utf-8"))


def _check_critic(folder: Path) -> None:
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(f"'{folder}' is neither a checkpoint (global_step_N) nor a model directory with a config.json")
    architecture = (json.loads(path.read_text(encoding="utf-8")).get("architectures") or ["?"])[0]
    if not architecture.endswith("ForTokenClassification"):
        raise UserError(f"'{folder}' is no critic but a {architecture}: give the huggingface/critic folder of a run")


def _training(run: Path) -> Iterator[tuple[str, str]]:
    """How the run trained it, from its config.yaml."""
    config: dict[str, Any] = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    for name, key in (("base model", "critic.model.path"), ("policy", "actor_rollout_ref.model.path")):
        path = str(get_at(config, key))
        # A path on somebody's machine says nothing to others; the last part of it may.
        yield name, PurePath(path).name if Path(path).expanduser().is_absolute() or Path(path).exists() else path
    loss, options = get_at(config, "critic.value_loss"), get_at(config, "critic.value_loss_kwargs")
    yield "value loss", f"{loss} {options}" if options else str(loss)
    pretrained = "pretrain" in config
    yield (
        "trained by",
        "critic pre-training on rollouts of the policy" if pretrained else "PPO together with the policy",
    )
    yield "learning rate", f"{get_at(config, 'critic.optim.lr'):g}"
    yield (
        "discount",
        f"gamma {get_at(config, 'algorithm.gamma'):g}"
        + ("" if pretrained else f", lambda {get_at(config, 'algorithm.lam_critic'):g}"),
    )
