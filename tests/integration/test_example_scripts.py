"""Every example script resolves with the overrides of today's tree; what cannot run yet says so in the plan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*/*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_an_example_script_resolves(script, tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(script), "--dry-run", "trainer.total_training_steps=2"]
    out = subprocess.run(command, env={**os.environ, "PATH": path}, cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "2 steps" in out.stdout
    assert not list(tmp_path.iterdir())


def test_there_are_scripts():
    assert len(SCRIPTS) >= 5
