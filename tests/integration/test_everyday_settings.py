"""What people set every day does what it promises, whatever else they have set.

`everyday_settings.json` holds the keys that published scripts set most often: in how many scripts, with which values,
and the values that are tried here, cut down to a tiny model. Runs of a few steps cover all pairs of these values, and
each value is held to its promise in every run that has it: against the files, metrics and samples of the run, and
against transformers, which computes losses, gradients and samples anew.
"""

import json
import math
import re
import shutil
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from everyday import Oracle, Pass, Seen, Settings, Update, pairwise, watched
from runs import read_metrics

from valor.lab import arithmetic
from valor.tracking import loggers
from valor.trainer.checkpoints import CheckpointStore
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

TABLE = json.loads(Path(__file__).with_name("everyday_settings.json").read_text())
VALUES: dict[str, list[Any]] = {row["key"]: row["tried"] for row in TABLE}
ACTOR, MODEL, REF = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.ref"
ROLLOUT, CRITIC, REWARD = "actor_rollout_ref.rollout", "critic", "reward_model.reward_kwargs.overlong_buffer_cfg"
GROUPED = ("grpo", "rloo", "gpg")
LONG, SHORT = 24, 12  # of data.max_prompt_length: no prompt is longer than the first, some are than the second
FIRST = ["1+2", "33+4", "5+6", "12345678+12345678", "7+88", "9+9", "1234567+123456", "8+3"]
SECOND = ["2+2", "4+44", "12345678+1234567", "6+1"]
HELD_OUT = ["3+3", "10+20", "1234567+1234567", "77+1", "5+5"]
REWARD_FUNCTION = Path(__file__).with_name("component_reward.py")


REFUSED: list[dict[str, list[Any]]] = [
    {"data.max_prompt_length": [SHORT], "data.truncation": ["error"], "data.filter_overlong_prompts": [False]},
    {f"{REWARD}.enable": [True], "reward_model.reward_manager": ["naive", "prime"]},
    {"trainer.critic_warmup": [1], "algorithm.adv_estimator": ["grpo", "rloo", "reinforce_plus_plus", "remax", "gpg"]},
    {f"{ROLLOUT}.n": [1], "algorithm.adv_estimator": [*GROUPED]},
    {
        f"{ACTOR}.policy_loss.loss_mode": ["gspo", "geo_mean"],
        f"{ACTOR}.loss_agg_mode": ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm"],
    },
]
"""What a run cannot have together: refused before it starts; gspo with token-mean, the default, is noted."""

RUNS = pairwise(VALUES, REFUSED)


class Run:
    """A run of `settings`, what it did, and what it was to read."""

    def __init__(self, settings: Settings, folder: Path, tiny: dict[str, Path], oracle: Oracle) -> None:
        self.settings, self.folder, self.tiny, self.oracle = settings, folder, tiny, oracle
        self.places = {name: str(path) for name, path in tiny.items()} | {"run": str(folder)}
        self.places["limit"] = str(settings["data.max_response_length"])
        self.seen = Seen()

    def __getitem__(self, key: str) -> Any:
        return self.settings[key]

    def start(self, *more: str) -> Seen:
        """Run the command line, once more where it has run already."""
        fixed = [
            f"reward.custom_reward_function.path={REWARD_FUNCTION}",
            "reward.num_workers=1",
            "trainer.device=cpu",
            "trainer.num_threads=1",
            "trainer.report=false",
        ]
        typed = [f"{key}={self.text(value)}" for key, value in self.settings.items() if value is not None]
        with watched() as seen:
            seen.code = main([*fixed, *typed, *more])
        return seen

    def text(self, value: Any) -> str:
        value = str(value)
        for name, path in self.places.items():
            value = value.replace(f"{{{name}}}", path)
        return value

    @property
    def run_dir(self) -> Path:
        named = Path("checkpoints") / self["trainer.project_name"] / self["trainer.experiment_name"]
        return self.folder / ("kept" if self["trainer.default_local_dir"] else named)

    def prompts(self, key: str) -> list[list[int]]:
        """Token ids of the prompts of data.train_files or data.val_files, in file order, cut or left out."""
        limit, side, found = self["data.max_prompt_length"], self["data.truncation"], []
        files = {"a": FIRST, "b": SECOND, "val": HELD_OUT}
        for name in re.findall(r"{(\w+)}", self[key]):
            for text in files[name]:
                asked = f"7{text}" if self["data.prompt_key"] == "question" else text
                messages = [{"role": "user", "content": asked}]
                ids = self.tiny_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                if len(ids) > limit and self["data.filter_overlong_prompts"]:
                    continue
                if len(ids) > limit:
                    ids = {
                        "left": ids[-limit:],
                        "right": ids[:limit],
                        "middle": ids[: limit // 2] + ids[len(ids) - limit + limit // 2 :],
                    }[side]
                found.append(ids)
        return found

    @property
    def tiny_tokenizer(self) -> Any:
        return arithmetic.make_tokenizer()

    @property
    def per_epoch(self) -> int:
        return len(self.prompts("data.train_files")) // self["data.train_batch_size"]

    @property
    def steps(self) -> int:
        return self["trainer.total_training_steps"] or self.per_epoch * self["trainer.total_epochs"]

    @property
    def has_critic(self) -> bool:
        return self["algorithm.adv_estimator"] == "gae"

    @property
    def needs_reference(self) -> bool:
        return self[f"{ACTOR}.use_kl_loss"] or self["algorithm.use_kl_in_reward"]

    @property
    def exact(self) -> bool:
        """Whether the actor computes in float32 with weights of its own, so that the oracle can follow it."""
        return self[f"{ACTOR}.fsdp_config.dtype"] == "float32"

    @property
    def loss(self) -> str:
        return self[f"{ACTOR}.policy_loss.loss_mode"]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Of the training steps."""
        return [row for step, row in self.seen.metrics if step > 0]

    @property
    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.rpartition("_")[2]) for path in self.run_dir.glob("global_step_*"))

    def notes(self, key: str) -> bool:
        """Whether it is said that a key has no effect, or is read as another."""
        return any(line.startswith("note: ") and key in line for line in self.seen.err.splitlines())


Promise = Callable[[Run, Any], None]
PROMISES: dict[str, Promise] = {}


def promise(*keys: str) -> Callable[[Promise], Promise]:
    """What every value of these keys is held to."""

    def register(check: Promise) -> Promise:
        for key in keys:
            assert key in VALUES and key not in PROMISES, key
            PROMISES[key] = check
        return check

    return register


def says_so(key: str, where: Callable[[Run], bool] = lambda run: True) -> Promise:
    """A value without effect (in runs where `where` holds) is told to have none."""
    return lambda run, value: None if not where(run) else _assert(run.notes(key), f"no note about {key}")


def _assert(holds: bool, message: str) -> None:
    assert holds, message


# --- data


def drawn(run: Run) -> dict[int, list[list[int]]]:
    """The prompts of each step, one for each group of samples, by the batch that is trained on."""
    n, found = run[f"{ROLLOUT}.n"], {}
    for step, batch in run.seen.batches.items():
        ids = [batch["prompts"][i, : int(batch["prompt_lengths"][i])].tolist() for i in range(len(batch))]
        assert all(ids[i] == ids[i - i % n] for i in range(len(ids)))
        found[step] = ids[::n]
    return found


@promise("data.train_files", "data.prompt_key", "data.filter_overlong_prompts", "data.truncation")
def _(run: Run, value: Any) -> None:
    expected, epoch = Counter(map(tuple, run.prompts("data.train_files"))), Counter()
    for step, prompts in sorted(drawn(run).items()):
        epoch.update(map(tuple, prompts))
        assert epoch <= expected, "a prompt that is in no file, or twice in an epoch"
        if step % run.per_epoch == 0:
            epoch.clear()


@promise("data.max_prompt_length")
def _(run: Run, value: int) -> None:
    lengths = [len(ids) for prompts in drawn(run).values() for ids in prompts]
    assert max(lengths) <= value
    assert [row["prompt_length/max"] for row in run.metrics] == [
        max(len(ids) for ids in prompts) for _, prompts in sorted(drawn(run).items())
    ]


@promise("data.shuffle", "trainer.seed")
def _(run: Run, value: Any) -> None:
    expected, size = run.prompts("data.train_files"), run["data.train_batch_size"]
    in_order = [expected[i * size : (i + 1) * size] for i in range(run.per_epoch)]
    shown = [prompts for step, prompts in sorted(drawn(run).items()) if step <= run.per_epoch]
    assert (shown == in_order[: len(shown)]) != run["data.shuffle"]


@promise("data.val_files")
def _(run: Run, value: Any) -> None:
    n, expected = run[f"{ROLLOUT}.val_kwargs.n"], run.prompts("data.val_files")
    for batch, _ in run.seen.validations.values():
        ids = [batch["prompts"][i, : int(batch["prompt_lengths"][i])].tolist() for i in range(len(batch))]
        assert ids == [one for one in expected for _ in range(n)]


@promise("data.train_batch_size", f"{ROLLOUT}.n")
def _(run: Run, value: int) -> None:
    size, n = run["data.train_batch_size"], run[f"{ROLLOUT}.n"]
    for step, batch in run.seen.batches.items():
        uids = Counter(batch.objects["uid"])
        assert len(uids) == size and set(uids.values()) == {n}, step
        if n > 1 and step == 1:  # samples of a prompt are not copies of each other
            assert len({tuple(ids) for ids in batch["responses"].tolist()}) > size


@promise("data.max_response_length", "reward_model.reward_kwargs.max_resp_len")
def _(run: Run, value: int) -> None:
    limit = run["data.max_response_length"]
    for batch in [*run.seen.batches.values(), *(batch for batch, _ in run.seen.validations.values())]:
        lengths, reasons = batch["response_lengths"].tolist(), batch.objects["finish_reason"]
        assert max(lengths) <= limit
        assert all((length == limit) for length, reason in zip(lengths, reasons, strict=True) if reason == "length")
    assert any(row["response_length/max"] == limit for row in run.metrics)


# --- steps, files, loggers


@promise("trainer.total_epochs", "trainer.total_training_steps")
def _(run: Run, value: Any) -> None:
    assert [step for step, _ in run.seen.metrics if step > 0] == list(range(1, run.steps + 1))
    assert {"actor", "critic"} >= {path.name for path in (run.run_dir / "huggingface").iterdir()}
    assert (run.run_dir / "huggingface" / "critic").exists() == run.has_critic
    ended = json.loads((run.run_dir / f"global_step_{run.steps}" / "trainer.json").read_text())
    assert ended["step"] == run.steps


@promise("trainer.save_freq", "trainer.max_ckpt_to_keep")
def _(run: Run, value: Any) -> None:
    every, newest = run["trainer.save_freq"], run["trainer.max_ckpt_to_keep"]
    saved = [step for step in range(1, run.steps + 1) if step == run.steps or (every > 0 and step % every == 0)]
    assert run.checkpoints == (saved[-newest:] if newest else saved)


@promise("trainer.test_freq", "trainer.val_before_train")
def _(run: Run, value: Any) -> None:
    every = run["trainer.test_freq"]
    due = {step for step in range(1, run.steps + 1) if step == run.steps or (every > 0 and step % every == 0)}
    due |= {0} if run["trainer.val_before_train"] else set()
    measured = {step for step, row in run.seen.metrics if any(name.startswith("val-core/") for name in row)}
    assert set(run.seen.validations) == measured == due


@promise("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name")
def _(run: Run, value: Any) -> None:
    assert (run.run_dir / "config.yaml").is_file()
    assert json.loads((run.run_dir / "run.json").read_text())["name"] == run["trainer.experiment_name"]
    beside = {path.name for path in run.folder.iterdir()} - {"rollouts", "validations"}
    assert beside == {run.run_dir.relative_to(run.folder).parts[0]}


@promise("trainer.logger")
def _(run: Run, value: str) -> None:
    steps = [step for step, _ in run.seen.metrics]
    assert (run.run_dir / "metrics.jsonl").exists() == ("file" in value)
    if "file" in value:
        assert [row["step"] for row in read_metrics(run.run_dir)] == steps
    assert bool([*(run.run_dir / "tensorboard").glob("events*")] if "tensorboard" in value else []) == (
        "tensorboard" in value
    ) and (run.run_dir / "tensorboard").exists() == ("tensorboard" in value)
    service = sys.modules["wandb"]
    logged = [row["training/global_step"] for row in service.logged]  # type: ignore[attr-defined]
    assert logged == (steps if "wandb" in value else [])
    if "wandb" in value:
        (facts,) = service.inits  # type: ignore[attr-defined]
        names = run["trainer.project_name"], run["trainer.experiment_name"]
        assert (facts["project"], facts["name"]) == names
        assert service.logged[-1]["actor/lr"] == run.metrics[-1]["actor/lr"]  # type: ignore[attr-defined]
    assert "console" not in value or f"{run.steps}/{run.steps}" in run.seen.out.replace(" ", "")


@promise("trainer.rollout_data_dir")
def _(run: Run, value: str | None) -> None:
    folder = run.folder / "rollouts"
    assert folder.exists() == bool(value)
    for step, batch in run.seen.batches.items() if value else ():
        _assert_written(folder / f"{step}.jsonl", step, batch, batch["token_level_scores"].sum(-1).tolist())


@promise("trainer.validation_data_dir", "trainer.log_val_generations")
def _(run: Run, value: Any) -> None:
    folder = run.folder / "validations"
    assert folder.exists() == bool(run["trainer.validation_data_dir"])
    for step, (batch, scores) in run.seen.validations.items():
        if run["trainer.validation_data_dir"]:
            _assert_written(folder / f"{step}.jsonl", step, batch, scores)
        shown = (run.run_dir / "samples" / f"val_step_{step}.jsonl").read_text().splitlines()
        assert len(shown) == min(run["trainer.log_val_generations"], len(batch))


def _assert_written(file: Path, step: int, batch: Any, scores: list[float]) -> None:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["score"] for row in rows] == pytest.approx(scores)
    assert {row["step"] for row in rows} == {step}
    for i, row in enumerate(rows):
        assert row["response_ids"] == batch["responses"][i, : int(batch["response_lengths"][i])].tolist()
        assert "input" in row and "output" in row and "gts" in row


@promise("trainer.n_gpus_per_node", "trainer.nnodes", f"{ACTOR}.ulysses_sequence_parallel_size")
def _(run: Run, value: int) -> None:
    tokens = [int((b["prompt_lengths"] + b["response_lengths"]).sum()) for _, b in sorted(run.seen.batches.items())]
    rates = [row["perf/throughput"] * row["perf/time_per_step"] for row in run.metrics]
    assert rates == pytest.approx(tokens)  # of each process, and there is one


# --- graders


def graded(run: Run, batch: Any, i: int) -> float:
    """What component_reward.py gives for row `i`."""
    ids = batch["responses"][i, : int(batch["response_lengths"][i])].tolist()
    text = run.tiny_tokenizer.decode(ids, skip_special_tokens=True)
    return float(sum(map(ord, text)) % 2 == 0)


@promise("reward_model.reward_manager", *(f"{REWARD}.{name}" for name in ("enable", "len", "penalty_factor")))
def _(run: Run, value: Any) -> None:
    limit, buffer = run["data.max_response_length"], run[f"{REWARD}.len"]
    for batch in run.seen.batches.values():
        scores = [graded(run, batch, i) for i in range(len(batch))]
        if run[f"{REWARD}.enable"]:
            over = [max(length - (limit - buffer), 0) for length in batch["response_lengths"].tolist()]
            scores = [
                score - run[f"{REWARD}.penalty_factor"] * x / buffer for score, x in zip(scores, over, strict=True)
            ]
        assert batch["token_level_scores"].sum(-1).tolist() == pytest.approx(scores)
    for batch, scores in run.seen.validations.values():
        assert scores == [graded(run, batch, i) for i in range(len(batch))]
    assert all(("reward/valor/arithmetic/overlong_reward" in row) == run[f"{REWARD}.enable"] for row in run.metrics)


PROMISES[f"{REWARD}.log"] = says_so(f"{REWARD}.log")


# --- sampling


def assert_sampled(run: Run, batch: Any, temperature: float, top_p: float, top_k: int) -> None:
    """Every token is one of those that may be drawn, and its log-prob that of the whole distribution."""
    with torch.no_grad():
        for i in range(len(batch)):
            logits = run.oracle.load(None).logits(batch, i) / temperature
            tokens = batch["responses"][i, : len(logits), None]
            log_probs = logits.log_softmax(-1).gather(1, tokens)[:, 0]
            assert torch.allclose(log_probs, batch["rollout_log_probs"][i, : len(logits)], atol=1e-4)
            if top_k > 0:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:] - 1e-5, -torch.inf)
            probs, order = logits.softmax(-1).sort(descending=True)
            before = torch.zeros_like(probs).scatter(1, order, probs.cumsum(-1) - probs)
            assert logits.gather(1, tokens).isfinite().all(), "a token that top_k leaves out"
            assert (before.gather(1, tokens) < top_p + 1e-5).all(), "a token that top_p leaves out"


@promise(f"{ROLLOUT}.temperature", f"{ROLLOUT}.top_p", f"{ROLLOUT}.top_k")
def _(run: Run, value: float) -> None:
    if run.exact:
        settings = (run[f"{ROLLOUT}.{name}"] for name in ("temperature", "top_p", "top_k"))
        assert_sampled(run, run.seen.batches[1], *settings)


@promise(*(f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_p", "top_k", "do_sample", "n")))
def _(run: Run, value: Any) -> None:
    names = ("n", "do_sample", "temperature", "top_p", "top_k")
    n, sampled, *how = (run[f"{ROLLOUT}.val_kwargs.{name}"] for name in names)
    for step, (batch, scores) in run.seen.validations.items():
        assert len(batch) == n * len(run.prompts("data.val_files"))
        head, row = "val-core/valor/arithmetic/reward", dict(run.seen.metrics)[step]
        assert row[f"{head}/mean@{n}"] == pytest.approx(sum(scores) / len(scores))
        assert (f"{head}/pass@2" in row) == (n > 1)
        if step == 0 and run.exact and sampled:
            assert_sampled(run, batch, *how)
        elif step == 0 and run.exact:
            with torch.no_grad():
                for i in range(len(batch)):
                    likeliest = run.oracle.load(None).logits(batch, i).argmax(-1)
                    assert likeliest.equal(batch["responses"][i, : len(likeliest)])


# --- advantages


@promise("algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo", "algorithm.gamma", "algorithm.lam")
def _(run: Run, value: Any) -> None:
    name, n = run["algorithm.adv_estimator"], run[f"{ROLLOUT}.n"]
    for batch in run.seen.batches.values():
        rewards, mask = batch["token_level_rewards"], batch["response_mask"]
        scores = rewards.sum(-1).view(-1, n)
        mean = scores.mean(1, keepdim=True)
        if name == "grpo":
            scale = scores.std(1, keepdim=True) + 1e-6 if n > 1 and run["algorithm.norm_adv_by_std_in_grpo"] else 1.0
            expected = ((scores - mean) / scale).view(-1, 1) * mask
        elif name == "rloo":
            expected = ((scores - mean) * n / max(n - 1, 1)).view(-1, 1) * mask
        elif name == "gpg":
            expected = (scores - mean).view(-1, 1) * mask * scores.numel() / max(int((scores != 0).sum()), 1)
        else:
            gamma = 1.0 if name == "remax" else run["algorithm.gamma"]
            decay = gamma * run["algorithm.lam"] if name == "gae" else gamma
            gains = rewards
            if name == "gae":
                values = batch["values"] * mask
                after = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
                gains = rewards + gamma * after - values
            expected, running = torch.zeros_like(rewards), torch.zeros(len(rewards))
            for t in reversed(range(rewards.shape[1])):
                running = (gains[:, t] + decay * running) * mask[:, t]
                expected[:, t] = running
            if name == "gae":
                assert torch.allclose(batch["returns"] * mask, (expected + values) * mask, atol=1e-5)
            if name == "remax":
                expected = (expected - batch["reward_baselines"][:, None]) * mask
            else:
                inside = expected[mask.bool()]
                expected = (expected - inside.mean()) / (inside.var() + 1e-8).sqrt() * mask
        assert torch.allclose(batch["advantages"] * mask, expected, atol=1e-4)
    unread = {
        "algorithm.norm_adv_by_std_in_grpo": name != "grpo",
        "algorithm.gamma": name not in ("gae", "reinforce_plus_plus"),
        "algorithm.lam": name != "gae",
    }
    assert {key: run.notes(key) for key in unread} == unread


@promise("algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef")
def _(run: Run, value: Any) -> None:
    on, coefficient = run["algorithm.use_kl_in_reward"], run["algorithm.kl_ctrl.kl_coef"]
    assert all(("actor/reward_kl_penalty" in row) == on for row in run.metrics)
    assert run.notes("algorithm.kl_ctrl.kl_coef") != on
    for step, batch in run.seen.batches.items():
        penalty = batch["token_level_scores"] - batch["token_level_rewards"]
        if not on:
            assert penalty.count_nonzero() == 0
            continue
        gap = (batch["old_log_probs"] - batch["ref_log_probs"]) * batch["response_mask"]
        assert torch.allclose(penalty, coefficient * gap, atol=1e-6)
        assert dict(run.seen.metrics)[step]["actor/reward_kl_penalty_coeff"] == coefficient
        if step == run.steps > 1 + run["trainer.critic_warmup"] and run.exact:
            assert gap.abs().max() > 1e-5  # the policy has left the reference


# --- updates


def learning(run: Run) -> list[int]:
    """The steps in which the policy is trained."""
    return list(range(1 + run["trainer.critic_warmup"], run.steps + 1))


@promise("trainer.critic_warmup")
def _(run: Run, value: int) -> None:
    assert {update.step for update in run.seen.of("actor")} == set(learning(run))
    assert {update.step for update in run.seen.of("critic")} == (
        {*range(1, run.steps + 1)} if run.has_critic else set()
    )
    assert all(("actor/pg_loss" in row) == (step in learning(run)) for step, row in run.seen.metrics if step > 0)


@promise(f"{ACTOR}.ppo_mini_batch_size", f"{ACTOR}.ppo_epochs")
def _(run: Run, value: int) -> None:
    size, n = min(run[f"{ACTOR}.ppo_mini_batch_size"], run["data.train_batch_size"]), run[f"{ROLLOUT}.n"]
    full, rest = divmod(run["data.train_batch_size"], size)
    expected = ([size * n] * full + [rest * n] * bool(rest)) * run[f"{ACTOR}.ppo_epochs"]
    for role, steps in (("actor", learning(run)), ("critic", range(1, run.steps + 1) if run.has_critic else ())):
        for step in steps:
            assert [len(update.rows) for update in run.seen.of(role, step)] == expected


def assert_micro_batches(one: Update | Pass, most_rows: int | None, most_tokens: int, *, packed: bool) -> None:
    """No row is left out or read twice, and none but a single one is beyond the limits. Packed rows share what they
    begin with; others are padded to the longest."""
    rows, micro = one.rows, one.micro_batches
    assert sorted(i for part in micro for i in part) == list(range(len(rows)))
    texts = [
        rows["prompts"][i, : int(rows["prompt_lengths"][i])].tolist()
        + rows["responses"][i, : int(rows["response_lengths"][i])].tolist()
        for i in range(len(rows))
    ]
    for part in micro:
        assert most_rows is None or len(part) <= most_rows
        read = len({(*texts[i][:end],) for i in part for end in range(1, len(texts[i]) + 1)})
        assert len(part) == 1 or (read if packed else len(part) * max(len(texts[i]) for i in part)) <= most_tokens


@promise(
    f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{CRITIC}.ppo_micro_batch_size_per_gpu",
)
def _(run: Run, value: Any) -> None:
    dynamic = run[f"{ACTOR}.use_dynamic_bsz"]
    for update in run.seen.updates:
        section = {"actor": ACTOR, "critic": CRITIC}[update.role]
        rows = None if dynamic else run[f"{section}.ppo_micro_batch_size_per_gpu"]
        tokens = run[f"{ACTOR}.ppo_max_token_len_per_gpu"] if update.role == "actor" else 32768
        packed = run[f"{MODEL if update.role == 'actor' else 'critic.model'}.use_remove_padding"]
        assert_micro_batches(update, rows, tokens, packed=packed)
        if dynamic and tokens >= 16384:
            assert len(update.micro_batches) == 1


@promise(
    *(
        f"{section}.log_prob_{name}"
        for section in (ROLLOUT, REF)
        for name in ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    )
)
def _(run: Run, value: Any) -> None:
    rows = None if run[f"{ACTOR}.use_dynamic_bsz"] else run[f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"]
    for role in ("actor", "ref"):
        passes = [one for one in run.seen.passes if one.role == role]
        assert role == "actor" or bool(passes) == run.needs_reference
        for one in passes:
            most = run[f"{ROLLOUT}.log_prob_max_token_len_per_gpu"]
            assert_micro_batches(one, rows, most, packed=run[f"{MODEL}.use_remove_padding"])
    assert all(run.notes(f"{REF}.log_prob_{name}") for name in ("micro_batch_size_per_gpu", "max_token_len_per_gpu"))


@promise(
    f"{ACTOR}.optim.lr",
    f"{ACTOR}.optim.lr_warmup_steps",
    f"{ACTOR}.optim.lr_warmup_steps_ratio",
    f"{ACTOR}.optim.lr_scheduler_type",
    f"{ACTOR}.optim.min_lr_ratio",
)
def _(run: Run, value: Any) -> None:
    of = {name: run[f"{ACTOR}.optim.{name}"] for name in ("lr", "lr_warmup_steps", "lr_scheduler_type", "min_lr_ratio")}
    total, floor = len(learning(run)), of["min_lr_ratio"]
    warmup = of["lr_warmup_steps"]
    if warmup < 0:
        warmup = int(run[f"{ACTOR}.optim.lr_warmup_steps_ratio"] * total)
    for number, step in enumerate(learning(run)):
        done = (number - warmup) / max(total - warmup, 1)
        falling = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
        share = falling[of["lr_scheduler_type"]]
        share = share if of["lr_scheduler_type"] == "constant" else floor + (1 - floor) * share
        rate = float(of["lr"]) * ((number + 1) / warmup if number < warmup else share)
        assert dict(run.seen.metrics)[step]["actor/lr"] == pytest.approx(rate), step
        for update in run.seen.of("actor", step):
            assert update.metrics["lr"] == pytest.approx(rate)
    constant = of["lr_scheduler_type"] == "constant"
    assert run.notes(f"{ACTOR}.optim.min_lr_ratio") == constant
    assert run.notes(f"{ACTOR}.optim.lr_warmup_steps_ratio") == (of["lr_warmup_steps"] != -1)


@promise(f"{CRITIC}.optim.lr")
def _(run: Run, value: str) -> None:
    assert all(update.metrics["lr"] == float(value) for update in run.seen.of("critic"))
    assert run.has_critic or run.notes(f"{CRITIC}.optim.lr")
    for update in run.seen.of("critic"):
        assert any(not one.equal(update.before[name]) for name, one in update.after.items())


@promise(f"{ACTOR}.grad_clip", f"{ACTOR}.optim.weight_decay")
def _(run: Run, value: float) -> None:
    limit, decay = run[f"{ACTOR}.grad_clip"], run[f"{ACTOR}.optim.weight_decay"]
    for update in run.seen.of("actor"):
        assert update.clipped_norm == pytest.approx(min(update.metrics["grad_norm"], limit), rel=1e-4)
    first, rate = run.seen.of("actor")[0], run.seen.of("actor")[0].metrics["lr"]
    for name, gradient in first.gradients.items():
        before, after = first.before[name].float(), first.after[name].float()
        expected = before * (1 - rate * decay) - rate * gradient / (gradient.abs() + 1e-8)
        assert torch.allclose(after, expected, atol=1e-6), name


def aggregated(run: Run, losses: list[torch.Tensor]) -> torch.Tensor:
    """One number from the token losses [n] of each row, by `loss_agg_mode`."""
    mode, limit = run[f"{ACTOR}.loss_agg_mode"], run["data.max_response_length"]
    if run.loss == "geo_mean":
        mode = "seq-mean-token-mean"
    sums, tokens = torch.stack([one.sum() for one in losses]), sum(len(one) for one in losses)
    return {
        "token-mean": lambda: sums.sum() / tokens,
        "token-sum": lambda: sums.sum(),
        "seq-mean-token-sum": lambda: sums.mean(),
        "seq-mean-token-sum-norm": lambda: sums.mean() / limit,
        "seq-mean-token-mean": lambda: torch.stack([one.mean() for one in losses]).mean(),
    }[mode]()


def policy_losses(run: Run, new: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Token losses [n] of a row."""
    low, high = 1 - run[f"{ACTOR}.clip_ratio_low"], 1 + run[f"{ACTOR}.clip_ratio_high"]
    log_ratio = new - old
    if run.loss == "gpg":
        return -advantages * new
    if run.loss == "gspo":
        log_ratio = log_ratio.mean().detach() + new - new.detach()
    if run.loss == "geo_mean":
        side = advantages.sign()
        bounded = torch.minimum(side * log_ratio, side * log_ratio.clamp(low - 1, high - 1)) * side
        return (-advantages.mean() * bounded.mean().exp()).expand_as(new)
    ratio = log_ratio.exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    if run.loss == "vanilla":
        bounded = torch.minimum(losses, -advantages * run[f"{ACTOR}.clip_ratio_c"])
        losses = torch.where(advantages < 0, bounded, losses)
    return losses


def expected_update(run: Run, update: Update) -> dict[str, float]:
    """Loss, KL, entropy and gradient norm of the policy's update, by transformers and autograd."""
    rows = update.rows
    pg, entropies, kls, clipped = [], [], [], 0
    read = run.oracle.load(update.before).rows(rows, run[f"{ROLLOUT}.temperature"])
    # The same weights have the ratio 1; under bfloat16 another pass's rounding is enough to be clipped.
    is_first = not run.exact and update is run.seen.of("actor", update.step)[0]
    for i, (new, entropy, _) in enumerate(read):
        n = len(new)
        old = rows["old_log_probs"][i, :n] if "old_log_probs" in rows and not is_first else new.detach()
        advantages = rows["advantages"][i, :n]
        pg.append(policy_losses(run, new, old, advantages))
        entropies.append(entropy)
        if run[f"{ACTOR}.use_kl_loss"]:
            gap = new - rows["ref_log_probs"][i, :n]
            kind = run[f"{ACTOR}.kl_loss_type"]
            kls.append(
                {"kl": gap, "mse": gap.square() / 2, "low_var_kl": ((-gap).exp() - 1 + gap).clamp(-10, 10)}[kind]
            )
        clipped += n
    found = {"pg_loss": aggregated(run, pg)}
    loss = found["pg_loss"]
    if run[f"{ACTOR}.entropy_coeff"]:
        found["entropy"] = torch.cat(entropies).mean()
        loss = loss - run[f"{ACTOR}.entropy_coeff"] * aggregated(run, entropies)
    if kls:
        found["kl_loss"] = aggregated(run, kls)
        loss = loss + run[f"{ACTOR}.kl_loss_coef"] * found["kl_loss"]
    loss.backward()
    norms = [p.grad.norm() for p in run.oracle.model.parameters() if p.grad is not None]
    return {name: one.item() for name, one in found.items()} | {"grad_norm": float(torch.stack(norms).norm())}


@promise(
    f"{ACTOR}.use_kl_loss",
    f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.kl_loss_type",
    f"{ACTOR}.entropy_coeff",
    f"{ACTOR}.clip_ratio_low",
    f"{ACTOR}.clip_ratio_high",
    f"{ACTOR}.clip_ratio_c",
    f"{ACTOR}.loss_agg_mode",
    f"{ACTOR}.policy_loss.loss_mode",
    f"{ACTOR}.fsdp_config.dtype",
    f"{ACTOR}.strategy",
    f"{ACTOR}.fsdp_config.param_offload",
    f"{ACTOR}.fsdp_config.optimizer_offload",
    f"{MODEL}.use_remove_padding",
    f"{MODEL}.enable_gradient_checkpointing",
    f"{REF}.fsdp_config.param_offload",
    f"{MODEL}.path",
)
def _(run: Run, value: Any) -> None:
    named = {"actor/kl_loss": run[f"{ACTOR}.use_kl_loss"], "actor/entropy": True}
    for step in learning(run):
        row = dict(run.seen.metrics)[step]
        assert all((name in row) == there for name, there in named.items() if name != "actor/entropy")
        assert "actor/entropy" in row or not run[f"{ACTOR}.entropy_coeff"]
    assert run.notes(f"{ACTOR}.kl_loss_coef") == (not run[f"{ACTOR}.use_kl_loss"])
    assert run.notes(f"{REF}.fsdp_config.param_offload") == (not run.needs_reference or bool(run[f"{MODEL}.lora_rank"]))
    if run[f"{MODEL}.lora_rank"]:
        return
    rough = {"rel": 1e-3, "abs": 1e-4} if run.exact else {"rel": 0.3, "abs": 0.03}
    # Sums whose terms cancel: under bfloat16 the rounding of ratios and gaps decides them.
    cancels = () if run.exact else ("pg_loss", "kl_loss") if run[f"{ACTOR}.kl_loss_type"] == "kl" else ("pg_loss",)
    for update in (run.seen.of("actor")[0], run.seen.of("actor")[-1]):
        for name, number in expected_update(run, update).items():
            if name in cancels:
                continue
            assert update.metrics[name] == pytest.approx(number, **rough), (name, update.step)


@promise(f"{MODEL}.lora_rank")
def _(run: Run, value: int) -> None:
    adapter = run.run_dir / "huggingface" / "actor" / "adapter"
    assert adapter.exists() == bool(value)
    trained = {name for update in run.seen.of("actor") for name in update.gradients}
    assert all(("lora_" in name) == bool(value) for name in trained)
    if value:
        assert json.loads((adapter / "adapter_config.json").read_text())["r"] == value
        first, last = run.seen.of("actor")[0].before, run.seen.of("actor")[-1].after
        changed = {name for name, one in last.items() if not one.equal(first[name])}
        assert changed and all("lora_" in name for name in changed)


# --- the critic


@promise(
    "critic.model.path",
    "critic.model.use_remove_padding",
    "critic.model.enable_gradient_checkpointing",
    "critic.model.fsdp_config.param_offload",
    "critic.model.fsdp_config.optimizer_offload",
)
def _(run: Run, value: Any) -> None:
    assert all(("critic/vf_loss" in row) == run.has_critic for row in run.metrics)
    assert run.has_critic or run.notes("critic.model.path")
    if run.has_critic:
        first = run.seen.of("critic")[0]  # an untrained head says 0, before and while it is clipped
        names = run.seen.batches[1], first.rows
        assert names[0]["values"].count_nonzero() == 0
        n = [int(length) for length in first.rows["response_lengths"]]
        losses = (
            [first.rows["returns"][i, :count].square() / 2 for i, count in enumerate(n)]
            if "returns" in first.rows
            else None
        )
        if losses is not None:
            mode = run.settings | {f"{ACTOR}.policy_loss.loss_mode": "vanilla"}
            expected = aggregated(Run(mode, run.folder, run.tiny, run.oracle), losses)
            assert first.metrics["vf_loss"] == pytest.approx(float(expected), rel=1e-3)


# --- what has no effect here is said to have none


for key in (
    f"{ROLLOUT}.gpu_memory_utilization",
    f"{ROLLOUT}.enable_chunked_prefill",
    f"{ROLLOUT}.max_num_batched_tokens",
    f"{ROLLOUT}.mode",
    f"{ACTOR}.megatron.tensor_model_parallel_size",
    f"{ACTOR}.megatron.pipeline_model_parallel_size",
    "data.return_raw_chat",
    "trainer.balance_batch",
    "actor_rollout_ref.hybrid_engine",
    f"{ROLLOUT}.tensor_model_parallel_size",
):
    PROMISES[key] = says_so(key.rpartition(".")[2])


@promise(f"{ROLLOUT}.name")
def _(run: Run, value: str) -> None:
    assert "name: native" in (run.run_dir / "config.yaml").read_text()


# --- resuming


@promise("trainer.resume_mode")
def _(run: Run, value: str) -> None:
    """The same command again, once the last checkpoint is gone: it goes on, or starts afresh, and does the same."""
    if len(run.checkpoints) < 2:
        return
    first, saved = run.seen.metrics, run.checkpoints
    shutil.rmtree(run.run_dir / f"global_step_{saved[-1]}")
    oldest = run.run_dir / f"global_step_{saved[0]}"
    again = run.start(*([f"trainer.resume_from_path={oldest}"] if value == "resume_path" else []))
    assert again.code == 0, run.settings
    done = {"auto": saved[-2], "resume_path": saved[0], "disable": 0}[value]
    assert [one for one in _unclocked(again.metrics) if one[0] > done] == [
        one for one in _unclocked(first) if one[0] > done
    ]
    assert (run.run_dir / "previous").exists() == (value == "disable" or done < saved[-2])


def _unclocked(rows: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, dict[str, Any]]]:
    clocks = ("timing", "perf/", "reward/grading_seconds", "trainer/idle_ratio")
    return [(step, {k: v for k, v in row.items() if not k.startswith(clocks)}) for step, row in rows]


# --- the runs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("everyday")
    files = {"model": arithmetic.make_model(root / "model", seed=0, initializer_range=0.2)}
    for name, texts in {"a": FIRST, "b": SECOND, "val": HELD_OUT}.items():
        asked = ((text, "0", {}) for text in texts)
        arithmetic.write_prompts(root / f"{name}.parquet", arithmetic.DATA_SOURCE, "math", asked)
        rows = pq.read_table(root / f"{name}.parquet").to_pylist()
        for row, text in zip(rows, texts, strict=True):
            row["question"] = [{"role": "user", "content": f"7{text}"}]
        pq.write_table(pa.Table.from_pylist(rows), root / f"{name}.parquet")
        files[name] = root / f"{name}.parquet"
    return files


@pytest.fixture(scope="module")
def oracle(inputs) -> Oracle:
    return Oracle(inputs["model"])


@pytest.fixture
def service(monkeypatch) -> Iterator[None]:
    """The few calls that are made of wandb."""
    fake: Any = types.ModuleType("wandb")
    fake.inits, fake.logged, fake.Error = [], [], RuntimeError
    fake.Histogram = lambda np_histogram: None
    run = types.SimpleNamespace(id="1", define_metric=lambda *a, **k: None, log=fake.logged.append, finish=lambda: None)
    fake.init = lambda **facts: (fake.inits.append(facts), run)[1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    real = loggers.importlib.util.find_spec
    found = types.SimpleNamespace(origin="wandb")
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda n, *a: found if n == "wandb" else real(n, *a))
    yield


@pytest.mark.parametrize(
    "number",  # every third one in `make test`; all of them together hold every pair of values
    [pytest.param(i, marks=[pytest.mark.long] if i % 3 else []) for i in range(len(RUNS))],
)
def test_a_run_keeps_what_its_settings_promise(number, inputs, oracle, service, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = Run(RUNS[number], tmp_path, inputs, oracle)
    run.seen = run.start(
        *(["trainer.resume_mode=auto"] if RUNS[number]["trainer.resume_mode"] == "resume_path" else [])
    )
    run.seen.out, run.seen.err = capsys.readouterr()
    assert run.seen.code == 0, run.seen.err
    broken = []
    checks: dict[Promise, list[str]] = {}
    for key in VALUES:
        checks.setdefault(PROMISES[key], []).append(key)
    for check, keys in sorted(checks.items(), key=lambda pair: "trainer.resume_mode" in pair[1]):
        try:
            check(run, run[keys[0]])
        except AssertionError as error:
            settings = ", ".join(f"{key}={run[key]}" for key in keys)
            broken.append(f"{settings}: {str(error)[:600]}")
    assert not broken, "\n".join(broken)


def test_every_value_is_tried_and_held_to_a_promise():
    assert PROMISES.keys() == VALUES.keys()
    assert all({str(run[key]) for run in RUNS} == {str(one) for one in some} for key, some in VALUES.items())
    counts = [row["scripts"] for row in TABLE]
    assert counts == sorted(counts, reverse=True) and len(counts) >= 60


@pytest.mark.parametrize("together", REFUSED, ids=lambda one: "+".join(key.rpartition(".")[2] for key in one))
def test_what_cannot_be_had_together_is_refused_before_anything_is_written(
    together, inputs, oracle, service, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    others = next(run for run in RUNS if all(run[key] in some for key, some in list(together.items())[1:]))
    run = Run(others | {key: some[-1] for key, some in together.items()}, tmp_path, inputs, oracle)
    assert run.start("trainer.resume_mode=auto").code == 2
    error = capsys.readouterr().err
    assert any(key.rpartition(".")[2] in error for key in together) and "Traceback" not in error
    assert not run.run_dir.exists()


@pytest.mark.parametrize("newest", range(1, 8))
def test_the_newest_checkpoints_stay(newest, tmp_path):
    """Of ten, and after going on from the eighth."""
    for steps in (range(1, 11), range(9, 13)):
        store = CheckpointStore(tmp_path, newest)
        for step in steps:
            store.save("PPO", {"step": step}, lambda folder: None, set())
        assert store.steps() == [*range(steps[-1] - newest + 1, steps[-1] + 1)]
