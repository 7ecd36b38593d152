"""Which samples a critic with a memory trains on, in which order, and with which values."""

from types import SimpleNamespace

import torch

from valor.config import PPOConfig, load
from valor.data.batch import Batch
from valor.trainer.phases.replay import UpdateCriticWithReplay
from valor.trainer.phases.standard import phases_of


class Critics:
    """Values are 10 times the number of the updates so far; remembers each update's step of origin and values."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, float, bool]] = []

    def compute_values(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        return Batch({"values": torch.full((1, 2), 10.0 * len(self.updates))}), {}

    def update(self, batch: Batch, step: int, *, last: bool) -> dict[str, float]:
        assert batch.meta == {"of": step}
        if not len(batch):
            return {}
        self.updates.append((int(batch["prompts"][0, 0]), float(batch["values"][0, 0]), last))
        return {"critic/vf_loss": float(batch["prompts"][0, 0])}


def step_of(number: int) -> Batch:
    one = torch.ones(1, 2)
    columns = {"responses": one.long(), "response_mask": one, "returns": one, "values": torch.full((1, 2), -1.0)}
    lengths = {"prompt_lengths": torch.ones(1).long(), "response_lengths": torch.full((1,), 2)}
    return Batch({"prompts": torch.full((1, 1), number), **columns, **lengths}, meta={"of": number})


def test_every_critic_that_learns_has_one_phase_that_trains_it() -> None:
    """A probe, whose sums hold earlier samples, and a frozen critic have no replay, and no less of a phase."""
    for settings in ([], ["critic.kind=probe"], ["critic.freeze=true", "critic.model.path=c"]):
        for replay in (0, 2):
            common = ["actor_rollout_ref.model.path=m", "data.train_files=d", f"critic.replay_steps={replay}"]
            names = [made.name for made in phases_of(load([*common, *settings], PPOConfig).config)]
            assert names.count("update_critic") == 1 and names.count("values") == 1


def phase(*settings: str) -> UpdateCriticWithReplay:
    common = ["actor_rollout_ref.model.path=m", "data.train_files=d", "critic.replay_steps=2"]
    made = UpdateCriticWithReplay(load([*common, *settings], PPOConfig).config)
    made.resources = SimpleNamespace(critics=Critics())  # type: ignore[assignment]
    return made


def run(made: UpdateCriticWithReplay, number: int) -> tuple[list[tuple[int, float, bool]], dict[str, float]]:
    critics = made.resources.critics
    before = len(critics.updates)  # type: ignore[attr-defined]
    _, metrics = made.run(step_of(number), number)
    return critics.updates[before:], metrics  # type: ignore[attr-defined]


def test_two_steps_are_replayed_oldest_first_with_the_present_values() -> None:
    made = phase()
    assert run(made, 1) == ([(1, -1.0, True)], {"critic/vf_loss": 1.0})
    assert run(made, 2)[0] == [(2, -1.0, False), (1, 20.0, True)]
    updates, metrics = run(made, 3)
    assert updates == [(3, -1.0, False), (1, 40.0, False), (2, 50.0, True)]
    assert metrics == {"critic/vf_loss": 3.0, "critic/replay_vf_loss": 1.5}
    assert [number for number, _, _ in run(made, 4)[0]] == [4, 2, 3]


def test_a_step_that_is_repeated_forgets_its_first_try() -> None:
    made = phase()
    for number in (1, 2):
        run(made, number)
    assert run(made, 2)[0][1:] == [(1, 40.0, True)]


def test_a_frozen_step_replays_nothing_and_is_remembered() -> None:
    made = phase("critic.freeze_steps=[2]")
    run(made, 1)
    assert [number for number, _, _ in run(made, 2)[0]] == [2]
    assert [number for number, _, _ in run(made, 3)[0]] == [3, 1, 2]


def test_samples_are_saved_and_loaded(tmp_path) -> None:
    made, other = phase(), phase()
    for number in (9, 10):
        run(made, number)
    made.save(tmp_path)
    other.load(tmp_path)
    assert list(other.earlier) == [9, 10]
    assert torch.equal(other.earlier[9]["prompts"], made.earlier[9]["prompts"])


def test_a_step_without_samples_leaves_nothing_to_replay() -> None:
    made = phase()
    run(made, 1)
    made.run(step_of(2).take([]), 2)
    assert [*made.earlier] == [1]
