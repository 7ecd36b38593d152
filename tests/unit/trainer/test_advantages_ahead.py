"""Advantages that read no log-probs are computed while the passes that give those still run."""

from concurrent.futures import Future
from threading import Event, get_ident
from types import SimpleNamespace

import pytest
import torch

from valor.config import load
from valor.data.batch import Batch
from valor.trainer import ppo
from valor.trainer.advantage import RewardShaping, reads_log_probs
from valor.trainer.old_log_probs import OldLogProbs
from valor.trainer.ppo import PPORun
from valor.trainer.step_metrics import Aside

ROWS, TOKENS = 4, 3
CORRECTION = "algorithm.rollout_correction"


class FakeRun(PPORun):
    """A run in one pool of ranks, whose passes return made-up columns and whose updates learn nothing."""

    def __init__(self, config, controller: str) -> None:
        self.config, self.step, self.seen = config, 1, list[str]()
        self.old, self.shaping = OldLogProbs.of(config), RewardShaping(config.algorithm, 0)
        self.placement = SimpleNamespace(controller=controller, world_size=1)  # type: ignore[assignment]
        self.roles = SimpleNamespace(submit=self.submit, peak_memory=dict)  # type: ignore[assignment]
        self.collector = SimpleNamespace(next_batch=self.next_batch)  # type: ignore[assignment]
        self.record = SimpleNamespace(samples=lambda *_: None)  # type: ignore[assignment]
        self.updates = SimpleNamespace(check=lambda _: None)  # type: ignore[assignment]
        self.sampler = SimpleNamespace(epoch=0)  # type: ignore[assignment]
        self.known = Event()

    def submit(self, _, function, *args):
        done: Future = Future()
        done.set_result(function(*args))
        return done

    def next_batch(self, *_):
        shape = (ROWS, TOKENS)
        columns = {"response_mask": torch.ones(shape), "token_level_scores": torch.arange(12.0).reshape(shape)}
        columns |= {name: torch.full((ROWS,), TOKENS) for name in ("response_lengths", "prompt_lengths")}
        columns["rollout_log_probs"] = columns["entropy"] = torch.zeros(shape)
        names = {"uid": ["a", "a", "b", "b"], "finish_reason": ["stop"] * ROWS, "reward_info": [{}] * ROWS}
        return Batch(columns, names), {}

    def compute_values(self, *_):
        return Batch({"values": torch.ones(ROWS, TOKENS)}), {}

    def compute_old_log_probs(self, *_):
        self.seen.append("in time" if self.known.wait(0.5) else "before")
        return Batch({"old_log_probs": -torch.ones(ROWS, TOKENS)}), {}

    def compute_ref_log_probs(self, *_):
        return Batch({"ref_log_probs": -2 * torch.ones(ROWS, TOKENS)}), {}

    def update_critic(self, batch, _):
        self.trained = batch
        return {}

    def update_actor(self, *_):
        return {}


@pytest.fixture
def step(monkeypatch):
    def one(controller: str, *overrides: str) -> FakeRun:
        run = FakeRun(load(["actor_rollout_ref.actor.ppo_mini_batch_size=2", *overrides]).config, controller)
        real = ppo.compute_advantages

        def noted(*args):
            found = real(*args)
            run.known.set()
            return found

        with monkeypatch.context() as patch:
            patch.setattr(ppo, "compute_advantages", noted)
            run.train_step()
        return run

    return one


def test_advantages_wait_for_values_alone_and_are_the_same(step):
    ahead, here = step("ray"), step("local")
    assert ahead.seen == ["in time"] and here.seen == ["before"]  # in this process one thing is done at a time
    assert {*ahead.trained.tensors} == {*here.trained.tensors} >= {"advantages", "old_log_probs", "ref_log_probs"}
    for name in ("advantages", "returns", "values"):
        assert torch.equal(ahead.trained[name], here.trained[name])


def test_rewards_with_a_kl_term_wait_for_the_log_probs(step):
    run = step("ray", "algorithm.use_kl_in_reward=true")
    assert run.seen == ["before"]
    assert not torch.equal(run.trained["token_level_rewards"], run.trained["token_level_scores"])


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        ([], False),
        (["algorithm.adv_estimator=grpo"], False),
        (["algorithm.use_kl_in_reward=true"], True),
        (["algorithm.adv_estimator=optimal_token_baseline"], True),
        (["algorithm.adv_estimator=vtrace"], True),
        ([f"{CORRECTION}.rollout_is=token"], True),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.bypass_mode=true"], False),
    ],
)
def test_who_reads_log_probs(overrides, reads):
    assert reads_log_probs(load(overrides).config) == reads


def test_what_is_beside_nothing_is_measured_in_the_thread_that_asks() -> None:
    """Another thread that calls torch would keep OpenMP threads of its own, beside which updates are slower."""
    asked: list[int] = []
    with Aside(beside=False) as aside:
        aside.measure(lambda: asked.append(get_ident()))
        assert asked == [get_ident()], "somebody else did it, or later"
        aside.measure(lambda: {"a": 1})
        assert aside.metrics() == {"a": 1}
