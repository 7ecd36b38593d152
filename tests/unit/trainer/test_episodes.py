"""Episodes in several rows: all that the driver computes is what it would be, had each of them one row."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from phase_runs import after, made
from valor import algorithms
from valor.config import PPOConfig, RolloutCorrectionConfig, load
from valor.data.batch import Batch, Episodes, pad_rows
from valor.errors import StepRefused
from valor.trainer.old_log_probs import corrected
from valor.trainer.phases.advantages import Advantages
from valor.trainer.phases.rewards import Rewards
from valor.trainer.phases.training_rows import TrainingRows, trained
from valor.trainer.phases.update_actor import UpdateActor
from valor.trainer.run import SkippedUpdates
from valor.trainer.step_metrics import batch_metrics, critic_diagnostics
from valor.trainer.updates import Critics, Updates, counted

# Turns of each episode as (tokens of the observation before it, tokens of the turn); whether the turn begins a new row.
EPISODES = [
    [(0, 3, False), (2, 2, True), (0, 4, True)],
    [(0, 5, False)],
    [(0, 2, False), (3, 2, False), (1, 1, True), (2, 3, False)],
    [(0, 1, False), (1, 4, True)],
    [(1, 2, False), (2, 3, False)],
    [(0, 4, False)],
]
ENDS = ["stop", "length", "turns", "stop", "turns", "stop"]
NUMBERS = ("values", "old_log_probs", "ref_log_probs", "sum_pi_squared", "token_level_scores")


def batches() -> tuple[Batch, Batch]:
    """The same tokens in one row an episode, and in rows that begin where a turn says so (with its observation)."""
    return build(lambda new_row: False), build(lambda new_row: new_row)


def build(starts_row) -> Batch:
    generator = torch.Generator().manual_seed(0)
    rows: list[dict[str, list[float]]] = []
    episode: list[int] = []
    for number, turns in enumerate(EPISODES):
        for k, (observed, spoken, new_row) in enumerate(turns):
            if k == 0 or starts_row(new_row):
                rows.append({name: [] for name in ("response_mask", "turn_ids", *NUMBERS)})
                episode.append(number)
            row, tokens = rows[-1], observed + spoken
            row["response_mask"] += [0] * observed + [1] * spoken
            row["turn_ids"] += [0] * observed + [k + 1] * spoken
            for name in NUMBERS[:-1]:
                row[name] += torch.rand(tokens, generator=generator).tolist()
            row["token_level_scores"] += [0.0] * (tokens - 1) + [float(k == len(turns) - 1) * (number % 3) + 0.1 * k]
    columns = {name: pad_rows([row[name] for row in rows], torch.float32)[0] for name in rows[0]}
    columns["turn_ids"] = columns["turn_ids"].long()
    of_episode = torch.tensor(episode)
    columns |= {
        "episode": of_episode,
        "response_lengths": torch.tensor([len(row["response_mask"]) for row in rows]),
        "prompts": torch.ones(len(rows), 2, dtype=torch.long),
        "prompt_lengths": torch.full((len(rows),), 2),
        "responses": columns["turn_ids"],
        "bootstrap_values": torch.linspace(-1, 1, 6)[of_episode],
        "reward_baselines": torch.linspace(0, 1, 6)[of_episode],
    }
    objects = {
        "uid": [str(number // 2) for number in episode],
        "finish_reason": [ENDS[number] for number in episode],
        "reward_info": [{"a": number % 3, "b": number % 2} for number in episode],
    }
    return Batch(columns, objects)


def at_policy_tokens(batch: Batch, name: str) -> Tensor:
    """The policy's tokens of all episodes, in order."""
    return batch[name][batch["response_mask"] == 1]


def through_the_step(batch: Batch, **settings) -> tuple[Batch, dict]:
    """Rewards, advantages and metrics, as a step makes them."""
    metrics = {}
    for phase in (Rewards, Advantages):
        batch, more = after(made(phase, settings), batch)
        metrics |= more
    joined = Episodes(batch).joined()
    run = PPOConfig.model_validate({"data": {"train_files": ["x"]}, "algorithm": settings})
    metrics |= batch_metrics(joined) | critic_diagnostics(joined, run)
    return batch, {key: value for key, value in metrics.items() if isinstance(value, float)}


@pytest.mark.parametrize(
    "settings",
    [
        {"gamma": 0.9, "lam": 0.8},
        {"gamma": 0.9, "lam_actor": 0.8, "truncated_responses": "bootstrap"},
        {"adaptive_lam_alpha": 0.3, "use_kl_in_reward": True},
        {"gae_unit": "turn", "gamma_turn": 0.9, "lam_turn": 0.8},
        {"gae_unit": "bilevel", "gamma_turn": 0.9, "lam": 0.5, "lam_critic": 1.0, "truncated_responses": "bootstrap"},
        {"reward_source": "critic"},
        {"reward_source": "critic", "adv_estimator": "rloo"},
        *({"reward_mask_ratio": 0.5, "missing_reward": how} for how in ("zero", "bootstrap", "exclude", "critic")),
        *(
            {"adv_estimator": name}
            for name in ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline", "remax")
        ),
        {"adv_estimator": "reinforce_plus_plus", "gamma": 0.9},
        {"adv_estimator": "optimal_token_baseline", "adv_kwargs": {"compact": True}},
        {"adv_estimator": "gdpo", "adv_kwargs": {"reward_keys": ["a", "b"]}},
    ],
    ids=str,
)
def test_rewards_advantages_returns_and_metrics(settings: dict) -> None:
    (one, metrics), (several, others) = (through_the_step(batch, **settings) for batch in batches())
    assert len(one) == 6 and len(several) == 10
    for name in ("token_level_rewards", "advantages", "returns", "value_mask"):
        if name in one:
            expected, found = at_policy_tokens(one, name), at_policy_tokens(several, name)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
            assert several[name].shape == several["response_mask"].shape
            assert name == "token_level_rewards" or not several[name][several["response_mask"] == 0].any()
    assert at_policy_tokens(one, "advantages").unique().numel() > 2
    if "reward_missing" in one:
        assert torch.equal(one["reward_missing"][several["episode"]], several["reward_missing"])
        kept = trained(after(made(TrainingRows, settings), several)[0])
        whole = set(several["episode"].tolist()) - set(several["episode"][several["reward_missing"]].tolist())
        if settings["missing_reward"] == "exclude":
            assert len(whole) == 3 and len(Episodes(kept).rows) == 3 and not kept["reward_missing"].any()
    assert metrics == pytest.approx(others, abs=1e-5, nan_ok=True)


def test_a_step_that_leaves_all_episodes_out() -> None:
    for batch in batches():
        batch.objects["finish_reason"] = ["length"] * len(batch)
        left, metrics = after(made(TrainingRows, {"truncated_responses": "exclude"}), batch)
        assert (
            metrics == {"training/left_out_ratio": 1.0}
            and len(trained(left)) == 0
            and len(Episodes(trained(left)).rows) == 0
        )


def test_without_several_rows_nothing_is_moved() -> None:
    batch = batches()[0]
    del batch.tensors["episode"]
    for plain in (batch, batch.union(Batch({"episode": torch.tensor([4, 0, 1, 7, 8, 2])}))):
        episodes = Episodes(plain)
        assert episodes.rows == [[0], [1], [2], [3], [4], [5]]
        assert episodes.joined() is plain
    assert Episodes(Batch({"response_mask": torch.zeros(0, 3)})).rows == []


def test_what_a_joined_episode_has() -> None:
    batch = batches()[1]
    whole = Episodes(batch).joined()
    assert [len(rows) for rows in Episodes(batch).rows] == [3, 1, 2, 2, 1, 1]
    assert whole.objects["uid"] == list("001122") and whole.objects["finish_reason"] == ENDS
    assert whole["response_lengths"].tolist() == [11, 5, 14, 6, 8, 4]
    assert whole["response_mask"].shape == (6, 3 * batch["response_mask"].shape[1])
    assert whole["prompts"].shape == (6, 2)


def test_explained_variance_by_turn() -> None:
    batch, _ = through_the_step(batches()[1], adv_whitening="none")
    _, metrics = through_the_step(batches()[1])
    found = {key for key in metrics if key.startswith("critic/vf_explained_var/")}
    assert found == {f"critic/vf_explained_var/turn_{k}" for k in range(1, 5)}
    second = batch["turn_ids"] == 2
    values, returns = batch["values"][second].double(), batch["returns"][second].double()
    expected = 1 - float((returns - values).var() / returns.var())
    assert metrics["critic/vf_explained_var/turn_2"] == pytest.approx(expected, abs=1e-5)
    single = batches()[0].take([1, 5])
    assert not [key for key in through_the_step(single)[1] if "turn_" in key]


def updates(*overrides: str) -> Updates:
    argv = ["data.train_batch_size=6", "actor_rollout_ref.actor.ppo_mini_batch_size=4", *overrides]
    return Updates(load(argv).config, SimpleNamespace(), SkippedUpdates(1, print))  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", ["false", "true"])
def test_mini_batches_take_whole_episodes(shuffle: str) -> None:
    """4 and 2 episodes, whatever their rows: the number of updates, which decides where old log-probs come from, is
    that of the configuration."""
    one, several = (through_the_step(batch)[0] for batch in batches())
    made = updates(
        "actor_rollout_ref.actor.policy_loss.loss_mode=turn_ppo", f"actor_rollout_ref.actor.shuffle={shuffle}"
    )
    pairs = list(zip(made.mini_batches("actor", one, 1), made.mini_batches("actor", several, 1), strict=True))
    assert [len(first) for first, _ in pairs] == [4, 2]
    for first, second in pairs:
        assert first["episode"].tolist() == second["episode"].unique_consecutive().tolist()
        assert first.meta == second.meta and "turn_ids" in second
        assert torch.equal(at_policy_tokens(first, "advantages"), at_policy_tokens(second, "advantages"))


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *(("ppo", mode) for mode in algorithms.LOSS_AGG_MODES),
        *((name, "token-mean") for name in ("reinforce", "cispo", "dppo_tv", "dppo_kl")),
        *((name, "seq-mean-token-mean") for name in ("turn_ppo", "sapo", "gspo")),
    ],
)
def test_losses_weigh_episodes_not_rows(name: str, mode: str) -> None:
    results = []
    for batch in batches():
        rows = counted(through_the_step(batch)[0])
        log_probs = (rows["old_log_probs"] + 0.3 * rows["ref_log_probs"]).requires_grad_()
        counts = {key: rows.meta[key] for key in ("num_tokens", "num_sequences")}
        counts |= {"sequence_lengths": rows["sequence_lengths"], "loss_agg_mode": mode, "loss_scale_factor": 9.0}
        mask = rows["response_mask"]
        made = updates(f"actor_rollout_ref.actor.policy_loss.loss_mode={name}")
        UpdateActor(made.config).refuse(rows)
        present = Batch({"old_log_probs": log_probs.detach() / mask})  # no number where the policy has no token
        made.roles = {"actor": SimpleNamespace(compute_log_probs=lambda *_, found=present, **__: found)}
        if name == "gspo":
            rows = made._with_ratios(rows)
        loss, _ = algorithms.policy_loss(
            name,
            log_probs=log_probs,
            old_log_probs=rows["old_log_probs"],
            advantages=rows["advantages"],
            response_mask=mask,
            turn_ids=rows["turn_ids"],
            sequence_log_ratio=rows.tensors.get("sequence_log_ratio"),
            **counts,
        )
        values = rows["values"].clone().requires_grad_()
        value_loss, _ = algorithms.value_loss(
            values=values, old_values=rows["values"], returns=rows["returns"], response_mask=mask, **counts
        )
        (loss + value_loss).backward()
        results.append((loss, value_loss, log_probs.grad[mask == 1], values.grad[mask == 1]))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_a_loss_that_has_to_see_a_whole_response_is_refused() -> None:
    one, several = batches()
    phase = UpdateActor(updates("actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean").config)
    phase.refuse(one)
    with pytest.raises(StepRefused, match=r"geo_mean .* episodes in several rows .* use .*loss_mode=turn_ppo or gspo"):
        phase.refuse(several)


def test_rollout_correction_weighs_and_rejects_episodes() -> None:
    config = RolloutCorrectionConfig(rollout_is="sequence", rollout_rs="seq_mean_k2", rollout_rs_threshold=0.1)
    results = []
    for batch in batches():
        batch["rollout_log_probs"], mask = batch["ref_log_probs"], batch["response_mask"]
        found, metrics = corrected(batch, batch["old_log_probs"], config)
        results.append((found["rollout_is_weights"][mask == 1], found["response_mask"][mask == 1], metrics))
    (weights, kept, metrics), (others, kept_there, more) = results
    torch.testing.assert_close(weights, others)
    assert torch.equal(kept, kept_there) and 0 < kept.sum() < len(kept)
    assert metrics == pytest.approx(more, abs=1e-5)


def test_the_critic_learns_where_turns_begin() -> None:
    """With one value a turn, only the first token of each has a target, and the loss's counts are those."""
    batch, _ = through_the_step(batches()[1], gae_unit="turn")
    first = [row[row > 0].unique().numel() for row in batch["turn_ids"]]
    assert batch["value_mask"].sum(1).tolist() == first
    made, seen = updates(), []
    made.run = lambda role, rows, step, **_: seen.extend(made.mini_batches(role, rows, step)) or {}  # type: ignore[method-assign]
    Critics(made.config, SimpleNamespace(), made).update(batch, 1)  # type: ignore[arg-type]
    assert sum(rows.meta["num_tokens"] for rows in seen) == sum(first) == 13
    for rows in seen:
        starts = rows["response_mask"].bool()
        assert (rows["response_mask"].sum(1) > 0).all() and rows["returns"][starts].all()
