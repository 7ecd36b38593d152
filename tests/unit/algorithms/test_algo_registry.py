"""Names, options, capabilities, users' own functions, and the tables that are shown."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from valor import algorithms
from valor.algorithms.registry import Registry, describe_algorithms
from valor.errors import UserError

CASE = {"rewards": torch.tensor([[0.0, 1.0]]), "response_mask": torch.ones(1, 2)}
OWN_FILE = """
from valor import algorithms

@algorithms.register_advantage("my_own", summary="the reward itself", paper="https://my.own", natural_loss="reinforce")
def my_own(*, rewards, response_mask, bonus=0.0):
    "What the table says of it is its summary."
    advantages = (rewards + bonus) * response_mask
    return advantages, advantages

@algorithms.register_policy_loss("my_loss")
def my_loss(inputs, *, clip_ratio_high, boost=1.0):
    "The log-probs themselves."
    return inputs.aggregate(-boost * clip_ratio_high * inputs.advantages * inputs.log_probs), {
        "boosted": inputs.fraction(inputs.advantages > 0)
    }

@algorithms.register_value_loss("my_value_loss")
def my_value_loss(values, returns):
    error = values - returns
    return error.abs(), 0 * error, values.detach()
"""


@pytest.fixture
def clean_registries() -> Iterator[None]:
    before = [(registry, dict(registry)) for registry in Registry.all]
    yield
    for registry, entries in before:
        registry.clear()
        registry.update(entries)


def load(path: Path) -> None:
    spec = importlib.util.spec_from_file_location("own_algorithms", path)
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def builtin(registry: Registry) -> set[str]:
    """Names that come with Valor: other tests of the same process may have registered more."""
    return {name for name in registry if registry[name].builtin}


def test_every_algorithm_of_the_catalogue_is_there() -> None:
    assert builtin(algorithms.ADVANTAGES) == {
        "gae", "grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo",
        "gpg", "gdpo", "optimal_token_baseline", "vtrace", "evpo",
    }  # fmt: skip
    assert builtin(algorithms.POLICY_LOSSES) == {
        "ppo", "vanilla", "gpg", "gspo", "cispo", "geo_mean", "sapo", "dro", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl",
        "reinforce", "turn_ppo",
    }  # fmt: skip
    assert builtin(algorithms.VALUE_LOSSES) == {"mse", "huber", "bce", "hl_gauss"}


def test_a_users_file_adds_algorithms_and_may_be_read_twice(tmp_path: Path, clean_registries: None) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN_FILE)
    load(path)
    load(path)
    advantages, _ = algorithms.compute_advantages("my_own", **CASE, bonus=1.0, group_ids=[0], gamma=0.5)
    assert advantages.tolist() == [[1.0, 2.0]]
    assert algorithms.ADVANTAGES["my_own"].options == {"bonus"}
    assert algorithms.ADVANTAGES["my_own"].capability.natural_loss == "reinforce"
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    loss, metrics = algorithms.policy_loss(
        "my_loss",
        log_probs=log_probs,
        old_log_probs=None,
        advantages=advantages,
        response_mask=torch.ones(1, 2),
        boost=2.0,
    )
    assert loss.item() == pytest.approx(2.0 * 0.2 * (1.0 + 4.0) / 2) and metrics["boosted"].item() == 1.0
    loss, _ = algorithms.value_loss(
        "my_value_loss", values=torch.ones(1, 2), returns=torch.zeros(1, 2), response_mask=torch.ones(1, 2)
    )
    assert loss.item() == 1.0
    text = describe_algorithms()
    assert "the reward itself" in text and "https://my.own" in text and "The log-probs themselves." in text
    assert "What the table says" not in text


def test_names_are_not_taken_over(tmp_path: Path, clean_registries: None) -> None:
    with pytest.raises(UserError, match="'grpo' is already registered"):
        algorithms.register_advantage("grpo")(lambda *, rewards, response_mask: (rewards, rewards))
    for text, error in ((OWN_FILE, None), (OWN_FILE.replace("bonus", "extra"), "already registered")):
        path = tmp_path / f"file{error is None}.py"
        path.write_text(text)
        if error is None:
            load(path)
        else:
            with pytest.raises(UserError, match=error):
                load(path)


def test_unknown_names_and_options_are_corrected() -> None:
    with pytest.raises(UserError, match="unknown advantage estimator 'gea'; did you mean gae"):
        algorithms.compute_advantages("gea", **CASE)
    with pytest.raises(UserError, match="did you mean norm_adv_by_std_in_grpo"):
        algorithms.compute_advantages("grpo", **CASE, group_ids=[0], norm_adv_by_std=False)
    with pytest.raises(UserError, match="unknown option of gae 'norm_adv_by_std_in_grpo'"):
        algorithms.compute_advantages("gae", **CASE, values=torch.zeros(1, 2), norm_adv_by_std_in_grpo=False)
    with pytest.raises(UserError, match="known: zero, raw"):
        algorithms.compute_advantages("grpo", **CASE, group_ids=[0], singleton="other")
    with pytest.raises(UserError, match="known: carry, drop"):
        algorithms.compute_advantages("reinforce_plus_plus", **CASE, reward_on_masked="other")


def test_capabilities_are_data() -> None:
    ours = builtin(algorithms.ADVANTAGES)
    table = {name: algorithms.ADVANTAGES[name].capability for name in ours}
    assert {name for name, one in table.items() if one.needs_critic} == {"gae", "vtrace", "evpo"}
    assert [name for name, one in table.items() if one.needs_greedy_baseline] == ["remax"]
    assert [name for name, one in table.items() if one.needs_components] == ["gdpo"]
    assert [name for name, one in table.items() if one.needs_sum_pi_squared] == ["optimal_token_baseline"]
    alone = {"gae", "reinforce_plus_plus", "remax", "vtrace", "evpo"}
    assert {name for name, one in table.items() if one.min_group_size < 2} == alone
    assert all(one.natural_loss in algorithms.POLICY_LOSSES for one in table.values())
    assert table["gpg"].natural_loss == "gpg"
    assert table["grpo"].needs() == [("min_group_size", 2)]


def test_the_description_names_everything() -> None:
    text = describe_algorithms()
    for registry in Registry.all:
        assert all(f"  {name} " in text for name in registry)
    for registry in (algorithms.ADVANTAGES, algorithms.POLICY_LOSSES):
        for entry in (registry[name] for name in builtin(registry)):
            about = (entry.function.__doc__ or "").partition("\n\n")[0]
            assert about and "https://" in about + entry.capability.paper, entry.name
    assert "needs_critic=True" in text and "policy loss" in text and "arxiv.org/abs/1707.06347" in text


def test_the_documented_deviations_name_real_places_and_options() -> None:
    page = (Path(__file__).parents[3] / "docs" / "from_verl.md").read_text()
    table = page.partition("| what (where) |")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) == 8 and all(len(row) == 5 for row in rows)
    for row in rows:
        name, _, places = row[0].partition(" (")
        option = row[4].strip("`").split("=")[0]
        assert name.startswith("**") and places
        for place in places.rstrip(")").replace("`", "").split(", "):
            assert place in algorithms.ADVANTAGES or place in algorithms.POLICY_LOSSES or hasattr(algorithms, place)
            if place in algorithms.ADVANTAGES and option in ("singleton", "reward_on_masked", "compact"):
                assert option in algorithms.ADVANTAGES[place].options
