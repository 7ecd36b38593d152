"""Every example script resolves with the overrides of today's tree; one of a backend that is not there is refused."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from valor.config import PPOConfig, SFTConfig, load

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*/*.sh"))
# Keeps the arguments, so that they can be given to a process that has imported everything already.
PYTHON = '#!/bin/sh\n[ "$1" = -m ] && printf "%s\\0" "$@" > "$ARGUMENTS"\n'
MODULE = "import runpy, sys\nrunpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)\n"

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_an_example_script_resolves(script, forks, tmp_path):
    bin_, here, kept, said = (tmp_path / name for name in ("bin", "here", "arguments", "said"))
    bin_.mkdir()
    here.mkdir()
    (bin_ / "python3").write_text(PYTHON)
    (bin_ / "python3").chmod(0o755)
    env = {**os.environ, "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}", "ARGUMENTS": str(kept)}
    subprocess.run(["bash", str(script), "--dry-run", "trainer.total_training_steps=2"], env=env, cwd=here, check=True)
    [_, module, *arguments] = kept.read_text().split("\0")[:-1]
    code, text = forks.start(MODULE, module, *arguments, log=said, cwd=here).wait(), said.read_text()
    assert "2 steps" in text and ("by megatron-core" in text) == ("megatron" in script.name)
    lacks = [line for line in text.splitlines() if re.search(r"no such file|this machine has no GPU|GPUs found", line)]
    assert code == (2 if lacks else 0), text
    assert not list(here.iterdir())


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*/config/*.yaml")), ids=lambda p: f"{p.parts[-3]}")
def test_an_example_file_resolves(file):
    root = SFTConfig if "sft" in file.parts else PPOConfig
    loaded = load([f"--config-path={file.parent}", f"--config-name={file.stem}"], root)
    assert loaded.config.trainer.experiment_name == "from_yaml" and not loaded.notes


def test_there_are_scripts():
    assert len(SCRIPTS) >= 5
