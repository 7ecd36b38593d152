"""What the pages for Python show runs as it stands: on the tiny model, in a process of its own."""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).parents[2]
RUN = "import runpy, sys\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')\n"

TINY = "total_training_steps=1, max_prompt_length=16"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reward_model(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward_model")
    config = AutoConfig.from_pretrained(tiny["model"], num_labels=1)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny["model"]).save_pretrained(folder)
    return folder


def runs(forks, tmp_path, script, *arguments):
    log = tmp_path / "log"
    assert forks.start(RUN, script, *arguments, log=log, cwd=tmp_path).wait() == 0, log.read_text()
    return log.read_text()


def test_grpo_from_trl(tiny, forks, tmp_path):
    said = runs(forks, tmp_path, ROOT / "examples/from_trl/grpo.py", tiny["model"], tmp_path / "run")
    rewards = [float(number) for number in re.search(r"^\[(.*)\]$", said, re.MULTILINE)[1].split(",")]
    assert len(rewards) == 2 and rewards[-1] > 0
    assert (tmp_path / "run/policy/model.safetensors").exists() and (tmp_path / "run/report.html").exists()


def test_ppo_from_trl(tiny, reward_model, forks, tmp_path):
    said = runs(forks, tmp_path, ROOT / "examples/from_trl/ppo.py", tiny["model"], reward_model, tmp_path / "run")
    assert re.findall(r"^(\d) -?\d", said, re.MULTILINE) == ["1", "2"]
    assert (tmp_path / "run/critic/model.safetensors").exists()


@pytest.mark.parametrize("page", ["docs/python.md", "README.md", "README.zh-CN.md"])
def test_blocks_of_a_page(page, tiny, forks, tmp_path):
    text = (ROOT / page).read_text()
    text = text.replace('"HuggingFaceTB/SmolLM2-135M-Instruct"', "MODEL").replace("total_training_steps=40", TINY)
    blocks = re.findall(r"(<!-- excerpt -->\n)?```python\n(.*?)```", text, re.DOTALL)
    code = [block for excerpt, block in blocks if not excerpt]
    assert code
    script = tmp_path / "page.py"
    script.write_text(f"MODEL = {str(tiny['model'])!r}\n" + "\n".join(code))
    assert "report.html" in runs(forks, tmp_path, script)
