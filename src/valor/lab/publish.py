"""`valor critic publish`, `valor publish`: a critic or a policy as a plain Hugging Face directory with a model card,
which carries the critic's scorecard, or the results of the policy's training."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import click
from jinja2 import Template
from safetensors import SafetensorError, safe_open

from valor.arguments import PATH, command, option
from valor.config.tree import get_at
from valor.errors import UserError
from valor.report.lab_pages import main_numbers
from valor.report.page import tiles_of
from valor.report.run_data import read_run
from valor.report.skeleton import model_name, short
from valor.tracking.rundir import METRICS_FILE, read_yaml

SCORECARD_FILES = ("scorecard.json", "scorecard.html")
CARD_FILE = "README.md"
# Ends of the architecture's name.
_READS_IMAGES = "ForConditionalGeneration"
_CLASSES: dict[str, tuple[str, ...]] = {
    "actor": ("ForCausalLM", "LMHeadModel", _READS_IMAGES),
    "critic": ("ForTokenClassification",),
}


@command("critic publish", "valor critic publish runs/demo/ppo/huggingface/critic my-critic", "critic")
@click.argument("critic", type=PATH)
@click.argument("out", type=PATH)
@option("--scorecard", type=PATH, metavar="DIR", help="The folder that valor critic score wrote about it.")
def main(critic: Path, out: Path, scorecard: Path | None) -> int:
    """Write a critic as a model with its card to the new folder OUT; `hf upload OWNER/NAME OUT` puts it on the hub.

    CRITIC: a global_step_N folder, or a Hugging Face directory of a critic.
    """
    publish(critic, out, scorecard)
    print(out)
    return 0


@command("publish", "valor publish runs/demo/ppo/huggingface/actor my-policy", "quickstart")
@click.argument("policy", type=PATH)
@click.argument("out", type=PATH)
def actor(policy: Path, out: Path) -> int:
    """Write a policy as a model with its card to the new folder OUT; `hf upload OWNER/NAME OUT` puts it on the hub.

    POLICY: a global_step_N folder, or a Hugging Face directory of a policy.
    """
    publish(policy, out, role="actor")
    print(out)
    return 0


def publish(model: Path, out: Path, scorecard: Path | None = None, role: str = "critic") -> None:
    """Write the model of `role` (critic or actor), its tokenizer, README.md and the scorecard's files to `out`.

    What the card says of the training comes from the run's folder in which `model` lies, if it lies in one. UserError:
    `model` is none, `out` is not empty, or the scorecard is another critic's; nothing is left behind then.
    """
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"'{out}' is not empty: give a new folder")
    card = _read_scorecard(scorecard) if scorecard else None
    checkpoint = (model / "trainer.json").is_file()
    if checkpoint:
        from valor.trainer.export import export_checkpoint

        export_checkpoint(model, out, role)
    else:
        _check_class(model, role)
        _check_files(model)
        shutil.copytree(model, out, ignore=shutil.ignore_patterns(CARD_FILE, *SCORECARD_FILES), dirs_exist_ok=True)
    if card is not None and card["weights"] not in (None, fingerprint(out)):
        shutil.rmtree(out)
        raise UserError(
            f"'{scorecard}' is the scorecard of other weights ({card['critic']}): run valor critic score with "
            f"critic.model.path={model}, then publish"
        )
    if scorecard is not None:
        for name in SCORECARD_FILES:
            shutil.copy(scorecard / name, out / name)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for name in ("target", "prompt_template"):
        if (learnt := config.get(f"value_{name}")) is not None:
            shutil.rmtree(out)
            raise UserError(
                f"'{model}' is a critic of critic.{name}={learnt}, whose values are not the scores that a card "
                "promises: publish a critic trained without, or use this one by its folder"
            )
    run = model.parent if checkpoint else model.parent.parent
    training = dict(_training(run, role)) if (run / "config.yaml").is_file() else {}
    (out / CARD_FILE).write_text(model_card(out.resolve().name, config, training, card, role), encoding="utf-8")


def model_card(
    name: str, config: Mapping[str, Any], training: Mapping[str, str], scorecard: Mapping[str, Any] | None, role: str
) -> str:
    """Markdown: what it is, how it was trained and scored, how to use it. `config`: the model's config.json."""
    text = resources.files("valor.lab").joinpath(f"{role}_card.md").read_text(encoding="utf-8")
    template = Template(text, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    # transformers writes the number of labels as their names, and leaves out its default of two.
    labels = len(config.get("id2label", "01"))
    numbers = list(main_numbers(scorecard)) if scorecard else []
    if scorecard:
        half = next(position for position in scorecard["positions"] if position["at"] == 0.5)
        numbers.append(("AUC at half of the answer", short(half["auc"]), ""))
    reads_images = config["architectures"][0].endswith(_READS_IMAGES)
    facts = {"training": training, "card": scorecard, "numbers": numbers}
    return template.render(name=name, config=config, labels=labels, reads_images=reads_images, **facts)


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


def _check_class(folder: Path, role: str) -> None:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = (config.get("architectures") or ["?"])[0]
    except (OSError, ValueError, AttributeError):
        raise UserError(f"'{folder}' is neither a checkpoint (global_step_N) nor a model with a config.json") from None
    if not architecture.endswith(_CLASSES[role]):
        raise UserError(f"'{folder}' is no {role} but a {architecture}: give the huggingface/{role} folder of a run")


def _check_files(folder: Path) -> None:
    """UserError: weights or a tokenizer are missing, or weights are cut off."""
    if not any(folder.glob("*token*.*")):
        raise UserError(f"'{folder}' holds no tokenizer: put its files there, then publish")
    index = folder / "model.safetensors.index.json"
    try:
        names = {*json.loads(index.read_text())["weight_map"].values()} if index.is_file() else {"model.safetensors"}
        for name in sorted(names):
            with safe_open(folder / name, "pt"):
                pass
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise UserError(f"the weights in '{folder}' are not whole: {error}") from None


def _training(run: Path, role: str) -> Iterator[tuple[str, str]]:
    """How the run trained it, from its config.yaml; of an actor also what came of it, from its metrics."""
    config: dict[str, Any] = read_yaml(run / "config.yaml")
    of, of_rl = partial(get_at, config), "actor_rollout_ref" in config
    paths = {"base model": "actor_rollout_ref.model.path" if of_rl else "model.path"}
    if role == "critic":
        paths = {"base model": "critic.model.path", "policy": "actor_rollout_ref.model.path"}
    for name, key in paths.items():
        path = str(of(key))
        # A path on somebody's machine says nothing to others; a part of it may.
        yield name, model_name(path) if Path(path).expanduser().is_absolute() or Path(path).exists() else path
    if role == "critic":
        loss, options, pretrained = of("critic.value_loss"), of("critic.value_loss_kwargs"), "pretrain" in config
        yield "value loss", f"{loss} {options}" if options else str(loss)
        how = "critic pre-training on rollouts of the policy" if pretrained else "PPO together with the policy"
    elif of_rl:
        loss = of("actor_rollout_ref.actor.policy_loss.loss_mode")
        how = f"reinforcement learning: {of('algorithm.adv_estimator')}, policy loss {loss}"
    else:
        how = "supervised fine-tuning"
    yield "trained by", how
    rate = "critic.optim.lr" if role == "critic" else "actor_rollout_ref.actor.optim.lr" if of_rl else "optim.lr"
    yield "learning rate", f"{of(rate):g}"
    if role == "critic":
        trace = "" if pretrained else f", lambda {of('algorithm.lam_critic'):g}"
        yield "discount", f"gamma {of('algorithm.gamma'):g}{trace}"
    elif of_rl:
        prompts, samples = of("data.train_batch_size"), of("actor_rollout_ref.rollout.n")
        yield "samples a step", f"{prompts} prompts x {samples}"
        for label, value, detail in tiles_of(read_run(run)) if (run / METRICS_FILE).is_file() else ():
            if label.startswith(("Validation", "Reward")):
                yield label.lower(), f"{value} ({detail})" if detail else value
