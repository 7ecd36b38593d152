"""Phases see the columns that they declare, and run beside others where their processes are their own."""

from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import pytest
import torch

from phase_runs import made
from valor.config import load
from valor.data.batch import Batch
from valor.errors import UserError
from valor.tracking.metrics import Timer
from valor.trainer.phases.base import Phase
from valor.trainer.phases.schedule import Schedule
from valor.trainer.phases.standard import phases_of

CORRECTION = "algorithm.rollout_correction"


def phase(name_: str, role_: str | None = None, reads_=(), adds_=(), does=lambda batch: {}) -> Phase:
    """A phase whose columns and metrics `does` returns."""

    class Made(Phase):
        name, role, reads, adds = name_, role_, frozenset(reads_), frozenset(adds_)

        def run(self, batch, step):
            return Batch(does(batch)), {name_: 1.0}

    return made(Made, {})  # type: ignore[return-value]


class Pools:
    """Each role has a thread of its own where `apart`, else this one."""

    def __init__(self, apart: bool) -> None:
        self.apart, self._threads = apart, {name: ThreadPoolExecutor(1) for name in ("actor", "critic")}

    def submit(self, role, function, *args):
        if self.apart:
            return self._threads[role].submit(function, *args)
        done: Future = Future()
        done.set_result(function(*args))
        return done


def run(phases, apart: bool = False):
    batch = Batch({"response_mask": torch.ones(2, 3), "token_level_scores": torch.zeros(2, 3)})
    return Schedule(phases).run(batch, 1, Timer(), Pools(apart))  # type: ignore[arg-type]


def column(value: float):
    return torch.full((2, 3), value)


def gives(name: str, value: float):
    return lambda batch: {name: column(value)}


@pytest.mark.parametrize("apart", [False, True])
def test_a_phase_sees_what_it_declares_and_no_more(apart) -> None:
    seen = []

    def add_one(batch):
        seen.append({*batch.tensors})
        return {"returns": batch["values"] + 1}

    first = phase("first", "critic", ["response_mask"], ["values"], gives("values", 1.0))
    batch, metrics = run([first, phase("second", None, ["values"], ["returns"], add_one)], apart)
    assert seen == [{"values"}] and batch["returns"].eq(2).all() and [*metrics] == ["first", "second"]


def test_a_column_that_is_not_declared_is_an_error() -> None:
    with pytest.raises(AssertionError, match="'first' adds"):
        run([phase("first", adds_=["values"], does=lambda batch: {"retruns": column(1.0)})])


def test_phases_of_other_processes_overlap_from_their_columns_alone() -> None:
    """The driver's phase needs the critic's column: it is done while the actor, which comes first, is still at work."""
    known = Event()

    def wait(batch):
        return {"old_log_probs": column(float(known.wait(20)))}

    def compute(batch):
        known.set()
        return {"advantages": batch["values"]}

    def add(batch):
        return {"both": batch["advantages"] + batch["old_log_probs"]}

    slow = phase("slow", "actor", ["response_mask"], ["old_log_probs"], wait)
    critic = phase("critic", "critic", ["response_mask"], ["values"], gives("values", 1.0))
    driver = phase("driver", None, ["values"], ["advantages"], compute)
    last = phase("last", "critic", ["advantages", "old_log_probs"], ["both"], add)
    batch, _ = run([slow, critic, driver, last], apart=True)
    assert batch["both"].eq(2).all(), "the driver has waited for the actor"


def test_a_replaced_column_reaches_later_phases_alone() -> None:
    def copied(name):
        return phase(name, None, ["response_mask"], [name], lambda batch: {name: batch["response_mask"]})

    replaces = phase("replaces", None, ["response_mask"], ["response_mask"], gives("response_mask", 0.0))
    batch, _ = run([copied("before"), replaces, copied("after")], apart=True)
    assert batch["before"].eq(1).all() and batch["after"].eq(0).all()


def test_an_error_of_a_phase_is_the_steps() -> None:
    def fails(batch):
        raise ValueError("broken")

    for apart in (False, True):
        with pytest.raises(ValueError, match="broken"):
            run([phase("fails", "critic", adds_=["values"], does=fails), phase("next", None, ["values"])], apart)


def test_lists_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(UserError, match=r"'second' reads 'valeus', which no phase before it adds.*values"):
        Schedule([phase("first", adds_=["values"]), phase("second", reads_=["valeus"])])
    with pytest.raises(UserError, match="two phases are called 'first'"):
        Schedule([phase("first"), phase("first")])


@pytest.mark.parametrize(
    ("overrides", "reads"),
    [
        ([], False),
        (["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"], False),
        (["algorithm.use_kl_in_reward=true"], True),
        (["algorithm.adv_estimator=optimal_token_baseline", "actor_rollout_ref.rollout.n=2"], True),
        (["algorithm.adv_estimator=vtrace"], True),
        ([f"{CORRECTION}.rollout_is=token"], True),
        ([f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.bypass_mode=true"], False),
    ],
)
def test_advantages_wait_for_log_probs_only_where_they_read_them(overrides, reads) -> None:
    """Otherwise they are computed while the passes that give those still run."""
    config = load(["actor_rollout_ref.actor.ppo_mini_batch_size=2", *overrides]).config
    schedule, waits = Schedule(phases_of(config)), {"advantages"}
    for _ in schedule.phases:
        waits |= {source.name for name in waits for source in schedule.sources[name]}
    assert ("old_log_prob" in waits) == reads


def test_a_file_of_the_users_changes_the_list(tmp_path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from valor.trainer.phases.base import Phase\n"
        "class Twice(Phase):\n"
        "    name, reads, adds = 'twice', frozenset(['advantages']), frozenset(['advantages'])\n"
        "def phases(standard, config):\n"
        "    at = [one.name for one in standard].index('advantages')\n"
        "    return [*standard[: at + 1], Twice(config), *standard[at + 1 :]]\n"
    )
    names = [one.name for one in phases_of(load([f"algorithm.phases_path={file}"]).config)]
    assert names[names.index("advantages") + 1] == "twice"
    for text, wrong in {"": "has no 'phases'", "def phases(standard, config):\n    return 1": "not int"}.items():
        file = tmp_path / f"wrong{len(text)}.py"
        file.write_text(text)
        with pytest.raises(UserError, match=wrong):
            phases_of(load([f"algorithm.phases_path={file}"]).config)
