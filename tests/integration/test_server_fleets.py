"""Many servers behind one run, and servers that a run starts itself."""

import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from runs import read_metrics
from served import Starter, starter
from test_served_models import GAP, ROLLOUT, STEPS, asks

from valor.trainer.main_ppo import main
from valor.user_files import load_file

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def servers(tiny, tmp_path_factory) -> Iterator[Starter]:
    with starter(tiny["model"], tmp_path_factory.mktemp("fleet")) as found:
        yield found


def numbers(row: dict[str, float]) -> dict[str, float]:
    return {name: one for name, one in row.items() if isinstance(one, float)}


def responses(folder: Path) -> list[dict[str, str]]:
    """What a run has sampled, in the order of its steps."""
    files = sorted(folder.glob("*.jsonl"), key=lambda file: int(file.stem))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


@pytest.mark.long
def test_eight_servers_of_which_one_dies_and_one_is_slow(servers, overrides, tmp_path):
    """The samples and metrics are those of one server."""
    seconds = {}

    def run(name: str, fleet: list) -> None:
        more = [f"trainer.rollout_data_dir={tmp_path / name}_rollouts", f"{ROLLOUT}.max_num_seqs=16"]
        began = time.monotonic()
        assert main(overrides(tmp_path / name, *STEPS, *asks(*fleet), *more)) == 0
        seconds[name] = time.monotonic() - began

    run("one", [servers.start("sglang")])
    fleet = [servers.start("sglang") for _ in range(8)]
    fleet[2].set(slow=0.1)
    rollouts = tmp_path / "eight_rollouts"

    def die() -> None:
        while not (rollouts / "1.jsonl").exists():
            time.sleep(0.005)
        fleet[5].set(die="generate")

    killer = threading.Thread(target=die)
    killer.start()
    run("eight", fleet)
    killer.join()
    assert fleet[5].process.poll() is not None
    one, eight = (responses(tmp_path / f"{name}_rollouts") for name in ("one", "eight"))
    assert len(one) == 32
    assert [row["output"] for row in one] == [row["output"] for row in eight]
    rows = {name: read_metrics(tmp_path / name)[1:] for name in seconds}
    for a, b in zip(rows["one"], rows["eight"], strict=True):
        assert b[GAP] < 1e-4 and numbers(a) == pytest.approx(numbers(b), rel=1e-3, abs=1e-4)
    share = [one.set().count("/generate") for one in fleet if one is not fleet[5]]
    assert all(share)
    print({name: round(spent, 1) for name, spent in seconds.items()}, share)


LAUNCH = """
import sys
sys.path[:0] = {paths!r}
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
print("flags", sys.argv[1:], flush=True)
if "--fail" in sys.argv:
    sys.exit("no GPU found")
from served_model import ServedModel

served = ServedModel(flags["--model-path"], "sglang", int(flags["--port"]))
served.faults = {{"starting": 2}}
served.run()
"""


@pytest.mark.long
def test_servers_that_a_run_starts(overrides, tmp_path, monkeypatch, capsys):
    """`python -m sglang.launch_server` is one of ours here: not ready at once, and with its end the run's."""
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(LAUNCH.format(paths=[one for one in sys.path if one]))
    run = [*STEPS, f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}.engine_kwargs.sglang.schedule_policy=lpm"]
    assert main(overrides(tmp_path / "none", *run)) == 2
    assert "SGLang is not installed here: pip install sglang" in capsys.readouterr().err
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent), prepend=":")
    assert main(overrides(tmp_path / "run", *run)) == 0
    rows = read_metrics(tmp_path / "run")[1:]
    assert len(rows) == 2 and all(row[GAP] < 1e-4 for row in rows)
    log = (tmp_path / "run" / "sglang_0.log").read_text()
    assert "'--context-length', '40'" in log and "'--schedule-policy', 'lpm'" in log and "'--tp-size', '1'" in log
    children = [one for one in psutil.Process().children(recursive=True) if "sglang" in " ".join(one.cmdline())]
    assert children == []
    assert main(overrides(tmp_path / "fails", *run, f"+{ROLLOUT}.engine_kwargs.sglang.fail=true")) == 1
    error = capsys.readouterr().err
    assert "the SGLang server that was started here has ended" in error and "no GPU found" in error


def test_the_conformance_script(servers, tiny, capsys):
    script = load_file(str(Path(__file__).parents[2] / "benchmarks" / "server_conformance.py"), "path")

    def check(kind: str, *more: str) -> tuple[int, list[str]]:
        url = servers.start(kind, faults=faults).url
        code = script.main([kind, url + ("/v1" if kind == "trtllm" else ""), str(tiny["model"]), *more])
        return code, [line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")]

    faults = {"slow": 0.03}
    for kind, count in (("sglang", 5), ("trtllm", 3)):
        code, lines = check(kind, "--name", "m")
        assert code == 0 and len(lines) == count and all(line.startswith("ok ") for line in lines), lines
    faults = {"torn": 20}
    code, lines = check("sglang")
    assert code == 1 and any(line.startswith("FAIL") and "was sent" in line for line in lines), lines
