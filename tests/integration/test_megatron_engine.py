"""The Megatron engine under every layout against FSDP2 on one process: outputs, losses, norms and weights."""

import json
import os
import sys
from importlib.util import find_spec

import pytest
import torch
from megatron_cases import CASES, LAST, MOVES, ROUNDED, Case, base_of, run_all
from ranks import run_ranks
from safetensors.torch import load_file

from forked import Forks
from valor.engines import checkpoint

if find_spec("megatron") is None:
    pytest.skip("needs megatron-core: pip install 'valor-rl[megatron]'", allow_module_level=True)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("megatron")
    bases = list({base_of(case).name: base_of(case) for case in [*CASES, *ROUNDED]}.values())
    forks = Forks("megatron_rank", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore", PYTHONPATH=os.pathsep.join(sys.path))
    try:
        for world in (1, 2, 4):
            run_ranks(forks, out, world, run_all, out, [*bases, *CASES, *ROUNDED], MOVES)
        run_ranks(forks, out, 1, run_all, out, [], LAST)
    finally:
        forks.close()
    return out


def whole_outputs(out, case: Case) -> dict[str, torch.Tensor]:
    """Those of all rows, from the ranks that have them; ranks with the same rows must agree."""
    whole, seen = {}, {}
    for rank in range(case.world):
        rows = json.loads((out / f"{case.name}.{rank}.json").read_text())["rows"]
        for name, value in load_file(out / f"{case.name}.{rank}.outputs").items():
            whole.setdefault(name, torch.full((12, *value.shape[1:]), torch.nan))[rows] = value
            assert torch.equal(seen.setdefault((name, tuple(rows)), value), value)
    return whole


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_layout_trains_as_fsdp2_does(found, case):
    base = base_of(case)
    ours, theirs = whole_outputs(found, case), whole_outputs(found, base)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-5)
    shares = {}
    for rank in range(case.world):
        log = json.loads((found / f"{case.name}.{rank}.json").read_text())
        shares.setdefault(log["share"], log["steps"])
        assert log["steps"] == shares[log["share"]]
    expected = json.loads((found / f"{base.name}.0.json").read_text())["steps"]
    for number, step in enumerate(expected[:3]):
        parts = [steps[number] for steps in shares.values()]
        for name, value in step.items():
            alike = name in ("grad_norm", "lr", "skipped") or name.endswith(("_max", "_min"))
            mine = parts[0][name] if alike else sum(part[name] for part in parts)
            assert mine == pytest.approx(value, abs=1e-5, rel=1e-5), (number, name)
    for when, within in (("start", 0.0), ("end", 2e-4)):  # as they were read: bit for bit
        mine, theirs = (load_file(found / f"{one.name}.{when}") for one in (case, base))
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, atol=within, rtol=0.0)


@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.name)
def test_bfloat16_is_near_that_of_fsdp2(found, case):
    """Losses of order 1 and gradient norms to 2 %: both engines keep float32 weights, and round at other places."""
    expected, steps = (json.loads((found / f"{one.name}.0.json").read_text())["steps"] for one in (base_of(case), case))
    for theirs, ours in zip(expected[:3], steps, strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=0.02, abs=0.02), name
    assert steps != expected[:3]  # it is no float32


def stored(folder) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, put together from its shards."""
    _, known = checkpoint.begin_to_read(folder, torch.nn.Module(), "AdamW")
    tensors = {name: torch.zeros(one.size, dtype=one.properties.dtype) for name, one in known.items()}
    checkpoint.read_into(folder, tensors)
    return tensors


@pytest.mark.parametrize("move", [m for m in [*MOVES, *LAST] if m.after is not None], ids=lambda m: m.case.name)
def test_checkpoint_moves_to_another_layout_or_engine(found, move):
    """Weights and moments arrive bit for bit, and so does what is exported."""
    name = move.case.name
    left, arrived = stored(found / f"{move.after}.checkpoint"), stored(found / f"{name}.again")
    assert left.keys() == arrived.keys() and any(key.endswith(".exp_avg_sq") for key in left)
    for key, value in left.items():
        assert torch.equal(arrived[key], value), key
    exported, again = (found / f"{move.after}.exported", found / f"{name}.arrived")
    for file in ("model.safetensors", "config.json"):
        assert (again / file).read_bytes() == (exported / file).read_bytes()


def test_run_that_moves_trains_as_one_that_does_not(found):
    expected = json.loads((found / f"{base_of(MOVES[0].case).name}.0.json").read_text())["steps"]
    chain = [move for move in [*MOVES, *LAST] if move.case.name.startswith("m")]
    assert len(chain) == len(expected) == 5
    for number, (move, step) in enumerate(zip(chain, expected, strict=True)):
        log = json.loads((found / f"{move.case.name}.move").read_text())
        assert log["version"] == number + 1
        assert log["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-5, abs=1e-5)
        if move.case.name != "m3-dp":  # whose metrics are of a half of the rows
            assert log["loss"] == pytest.approx(step["loss"], rel=1e-5, abs=1e-5)


def test_checkpoint_of_several_ranks_is_in_several_files(found):
    shards = sorted((found / "m4-tp-pp.checkpoint").glob("*.safetensors"))
    assert len(shards) == 4
