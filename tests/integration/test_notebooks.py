"""The notebooks of the documentation run from a fresh kernel, and hold no output and no place of a machine."""

import json
import os
import re
import time
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "docs" / "notebooks").glob("*.ipynb"))
LONG = ("own_estimator", "reading_a_critic")

# A session of its own, as a kernel has: what ends it ends its whole process group.
KERNEL = """
import os, sys
os.setsid()
from ipykernel.kernelapp import IPKernelApp
IPKernelApp.launch_instance(argv=sys.argv[1:])
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def forked_kernels(forks, tmp_path, monkeypatch):
    """Kernels that have imported what training needs: ten seconds less for each."""
    pytest.importorskip("nbclient", reason="pip install 'valor-rl[dev]'")
    from jupyter_client.provisioning import local_provisioner

    def launch(command, **options):
        kernel = forks.start(KERNEL, *command[command.index("-f") :], log=tmp_path / "kernel.log", cwd=options["cwd"])
        while os.getpgid(kernel.pid) != kernel.pid:
            time.sleep(0.01)
        kernel.stdin = kernel.stdout = kernel.stderr = None
        return kernel

    monkeypatch.setattr(local_provisioner, "launch_kernel", launch)


def executed(path, folder):
    """The notebook with its outputs. Begun anew where another test has taken a port that was free for the kernel."""
    import nbclient
    import nbformat

    for attempts_left in (2, 1, 0):
        notebook = nbformat.read(path, as_version=4)
        client = nbclient.NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(folder)}})
        try:
            client.execute()
        except RuntimeError:
            if not attempts_left or "Address already in use" not in (folder / "kernel.log").read_text():
                raise
        else:
            break
    return notebook


@pytest.mark.usefixtures("forked_kernels")
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] if path.stem in LONG else []) for path in NOTEBOOKS],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs(path, tmp_path):
    notebook = executed(path, tmp_path)
    said = json.dumps([cell.get("outputs") for cell in notebook.cells])
    told = {
        "first_run": "(?s)reward 0.*val-core/own/reward/mean@1.*True.*valor ppo",
        "own_reward": "(?s)reward/own/starts_right.*cannot travel to other processes",
        "own_estimator": r"(?s)-0\.5.*0\.5",
        "reading_a_critic": "(?s)explained variance.*2 .*1 ",
    }
    assert re.search(told[path.stem], said), said


def test_there_are_four_and_they_are_clean():
    assert len(NOTEBOOKS) == 4
    for path in NOTEBOOKS:
        text = path.read_text()
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in json.loads(text)["cells"])
        assert "/work" not in text and "/home" not in text and "/tmp" not in text
