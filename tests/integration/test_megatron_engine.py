"""The Megatron engine under every layout against FSDP2 on one process: outputs, losses, norms and weights."""

import json
from importlib.util import find_spec

import pytest
import torch
from megatron_cases import CASES, Case, base_of, run_all
from ranks import run_ranks
from safetensors.torch import load_file

from forked import Forks

if find_spec("megatron") is None:
    pytest.skip("needs megatron-core: pip install 'valor-rl[megatron]'", allow_module_level=True)


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    out = tmp_path_factory.mktemp("megatron")
    bases = list({base_of(case).name: base_of(case) for case in CASES}.values())
    forks = Forks("megatron_rank", OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    try:
        for world in (1, 2, 4):
            run_ranks(forks, out, world, run_all, out, [*bases, *CASES])
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
    for number, step in enumerate(expected):
        parts = [steps[number] for steps in shares.values()]
        for name, value in step.items():
            alike = name in ("grad_norm", "lr", "skipped") or name.endswith(("_max", "_min"))
            mine = parts[0][name] if alike else sum(part[name] for part in parts)
            assert mine == pytest.approx(value, abs=1e-5, rel=1e-5), (number, name)
    after = load_file(found / f"{base.name}.weights")
    mine = load_file(found / f"{case.name}.weights")
    assert mine.keys() == after.keys()
    for name, value in after.items():
        torch.testing.assert_close(mine[name], value, atol=2e-4, rtol=1e-4)
