"""One batch, 1, 2 and 4 ranks over gloo, every way of saving memory: the same outputs, losses, gradients, updates."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_rank import ROWS, SIZES, Case, build, run_all, whole_batch, whole_state
from loading_rank import loaders, make_models
from ranks import run_ranks
from safetensors.torch import load_file

from valor.engines import distributed
from valor.models.rows import in_families, model_inputs

pytestmark = pytest.mark.slow

ROLES = ("actor", "grpo", "critic")
SAVING = {"param_offload": True, "optimizer_offload": True, "reshard_after_forward": True}
PLAIN = [Case(role) for role in ROLES]
PACKED = [
    Case("actor", packed=True),
    Case("grpo", SAVING, checkpointing=True, packed=True),
    Case("critic", packed=True),
]
SHARED = [replace(case, shared=2) for case in PACKED]  # sequence parallelism
SAVED = [Case(role, SAVING, checkpointing=True) for role in ROLES]
HYBRID = [Case(role, {"fsdp_size": 2, "reshard_after_forward": False}, checkpointing=True) for role in ROLES]
WINDOWS = [Case("windows"), Case("windows", packed=True, shared=2)]
WIDE = [Case("actor", HYBRID[0].fsdp, packed=True, shared=4)]
CASES = {
    1: [*PLAIN, *SAVED, *PACKED, WINDOWS[0]],
    2: [*PLAIN, *SAVED, *PACKED, *SHARED, *WINDOWS],
    4: [*PLAIN, *SAVED, *HYBRID, *PACKED, *SHARED, *WIDE],
}


@pytest.fixture(scope="module")
def found(forks, tmp_path_factory) -> dict[int, Path]:
    """A folder of results for each world size."""
    root = tmp_path_factory.mktemp("worlds")
    folders = {world: root / str(world) for world in CASES}
    make_models(root, **SIZES)
    for world, cases in CASES.items():
        run_ranks(forks, root, world, run_all, folders[world], cases, root)
    return folders


def ranks(folder: Path, case: Case, world: int) -> list[dict]:
    return [json.loads((folder / f"{case.name}.{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.parametrize(("world", "case"), [(w, c) for w, cases in CASES.items() for c in cases], ids=str)
def test_equal_to_one_plain_rank(found, world, case):
    plain = Case(case.role)
    (expected,) = ranks(found[1], plain, 1)
    results = ranks(found[world], case, world)
    shares = list({result["share"]: result for result in results}.values())
    assert len(shares) == world // case.shared
    assert sorted(row for result in shares for row in result["rows"]) == list(range(ROWS))
    outputs = load_file(found[1] / f"{plain.name}.0.outputs")
    for rank, result in enumerate(results):
        for name, value in load_file(found[world] / f"{case.name}.{rank}.outputs").items():
            torch.testing.assert_close(value, outputs[name][result["rows"]], rtol=0, atol=1e-5)
    grads = load_file(found[1] / f"{plain.name}.grads")
    for name, value in load_file(found[world] / f"{case.name}.grads").items():
        torch.testing.assert_close(value, grads[name], rtol=1e-4, atol=1e-5)
    for number, step in enumerate(expected["steps"]):
        mine = [result["steps"][number] for result in results]
        for key in ("loss", "rows"):
            told = [result["steps"][number].get(key, 0.0) for result in shares]
            assert sum(told) == pytest.approx(step[key], abs=1e-4)
        assert all(one["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4) for one in mine)
        assert all(one["skipped"] == 0.0 for one in mine)


def test_rows_of_these_runs_share_tokens():
    assert sum(in_families(*model_inputs(whole_batch()))[1]) > 30


@pytest.mark.parametrize("name", loaders(Path()))
@pytest.mark.parametrize("world", [2, 4])
def test_a_model_that_one_rank_reads_is_the_same_on_all(found, world, name):
    logs = [json.loads((found[w] / f"loaded.{r}.json").read_text()) for w in (1, world) for r in range(w)]
    for rank, log in enumerate(logs[1:]):
        assert log[name]["meta"] == [rank > 0 and name != "no pickle"]
        assert log[name]["facts"] == logs[0][name]["facts"]
    same_tensors(found, world, f"loaded {name}.weights", f"loaded {name}.weights", exact=True)
    for rank in range(world):
        same_tensors(found, world, f"loaded {name}.0", f"loaded {name}.{rank}", exact=False)


def same_tensors(found: dict[int, Path], world: int, alone: str, here: str, *, exact: bool) -> None:
    """Bit for bit, but for outputs where they need not be `exact`."""
    expected, got = load_file(found[1] / alone), load_file(found[world] / here)
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        free = not exact and not key.startswith("buffer ")
        torch.testing.assert_close(got[key], value, rtol=0, atol=1e-5 if free else 0)


@pytest.mark.parametrize("world", [2, 4])
def test_files_that_rank_0_cannot_read_end_all_ranks_with_its_line(found, world):
    said = {json.loads((found[world] / f"loaded.{rank}.json").read_text())["damaged"] for rank in range(world)}
    assert len(said) == 1 and "damaged" in said.pop()


@pytest.mark.parametrize("world", [2, 4])
def test_muon_sees_matrices_whole(found, world):
    alone, shards = (load_file(found[w] / "muon.updates") for w in (1, world))
    for name, update in alone.items():
        # The iteration is in bfloat16, and enlarges small singular values, noise among them.
        assert (shards[name] - update).norm() < 0.25 * update.norm() > 0, name


@pytest.mark.parametrize("world", [2, 4])
def test_checkpoints_go_from_one_rank_to_several_and_back(found, world):
    def state(number: int, name: str) -> dict[str, torch.Tensor]:
        return load_file(found[number] / f"{name}.state")

    def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

    assert_same(state(world, "arrived"), state(1, "saved"))
    distributed.init_process_group("cpu")
    engine = build(Case("actor"))
    engine.load(found[world] / "checkpoint")
    assert_same(whole_state(engine), state(world, "saved"))
    distributed.leave_process_group()
