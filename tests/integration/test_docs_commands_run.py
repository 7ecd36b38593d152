"""Commands of README and docs whose models, data and machines are placeholders do run: a step each, all of it small."""

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import test_docs_commands as docs

from forked import VALOR

pytestmark = [pytest.mark.slow, pytest.mark.long]

REWARD = """def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):
    return len(solution_str) % 3

other_function = compute_score
"""
SMALL = {
    "data.train_batch_size": 4,
    "data.max_prompt_length": 64,
    "data.max_response_length": 8,
    "trainer.total_training_steps": 1,
    "trainer.device": "cpu",
    "trainer.num_threads": 1,
    "trainer.n_gpus_per_node": 1,
    "trainer.report": "false",
    "trainer.default_local_dir": "run",
}
PPO = {
    "data.val_max_samples": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "critic.ppo_mini_batch_size": 4,
    "reward.num_workers": 1,
}
OF_CRITICS = {"score.mc": 2, "score.positions": 2, "score.responses": 4, "search.samples": "[1,2]"}
ELSEWHERE = {  # what a command asks of the world that this machine does not have
    r"agent.environment=|taskset=|custom_path=my|phases_path=": "a file of the reader's, or with a test of its own",
    r"base_url=|judge.url=|rollout.name=": "a server or vLLM",
    r"node_rank=|resource_pools=|rollout.nnodes=|n_gpus_per_node=2": "several processes, under Ray",
    r"separate_async": "processes of its own: test_asynchronous",
    r"image_key=|examples/vision": "images",
    r"gives=progress|deberta|PRM": "a reward model",
    r"docs/algorithms": "test_algorithms",
    r"step_separator|config-path \.": "a file of the reader's",
    r"valor.rewards.code": "a grader of programs",
}


def commands() -> list[tuple[str, list[str]]]:
    """Page and words of each command of a run, without those that `ELSEWHERE` names."""
    found = []
    for page in docs.PAGES:
        blocks = [block for runnable, block in docs.BLOCK.findall(page.read_text()) if not runnable]
        for words in (words for block in blocks for words in docs.commands(block)):
            if words[:2] == ["python", "-m"] and words[2].startswith("valor.trainer.main_"):
                words = ["valor", words[2].removeprefix("valor.trainer.main_"), *words[3:]]
            if words[0] in docs.ELLIPSES or re.match(r"[\w+]+\.[\w.]+=", words[0]):
                words = ["valor", "ppo", *words]
            text = " ".join(words)
            here = re.match(r"valor (ppo|rm train|eval|critic (pretrain|score|search)) ", text)
            if here and not any(re.search(pattern, text) for pattern in ELSEWHERE):
                found.append((str(page.relative_to(docs.ROOT)), words[1:]))
    return found


def small(words: list[str], tiny: dict[str, Path], pairs: Path) -> list[str]:
    """The command with the tiny model and data in place of its own, and small sizes behind its settings."""
    name = next(" ".join(words[:n]) for n in (2, 1) if " ".join(words[:n]) in docs.RUNS)
    given = [word for word in words[len(name.split()) :] if word not in docs.ELLIPSES and word != "--dry-run"]
    models = [word for word in given if name == "eval" and "=" not in word]
    settings = [
        word for word in given if word not in models and not word.partition("=")[0].endswith(("path", "_files"))
    ]
    sizes = dict(SMALL)
    if name == "rm train":
        sizes |= {"model.path": tiny["model"], "data.train_files": pairs, "data.max_length": 64}
        for key in ("data.max_prompt_length", "data.max_response_length", "trainer.report"):
            sizes.pop(key)
    else:
        sizes |= PPO | {"actor_rollout_ref.model.path": tiny["model"], "data.train_files": tiny["train"]}
        sizes |= {"reward.custom_reward_function.path": "my_reward.py"}
        if "val_files" in " ".join(given) or "--config-name" in given:
            sizes["data.val_files"] = tiny["val"]
    if name in ("critic score", "critic search", "eval"):
        kept = ("data.max", "data.val", "actor_rollout_ref.model", "reward.", "trainer.device", "trainer.num_threads")
        sizes = {key: value for key, value in sizes.items() if key.startswith(kept)}
        sizes |= {key: value for key, value in OF_CRITICS.items() if key.startswith(name.split()[-1])}
    if name == "critic pretrain":
        sizes.pop("data.val_max_samples")
    settings = [word for word in settings if word.lstrip("+").partition("=")[0] not in sizes]
    return [*name.split(), *(str(tiny["model"]) for _ in models), *settings, *(f"{k}={v}" for k, v in sizes.items())]


@pytest.fixture(scope="module")
def files(tiny, tmp_path_factory):
    """Twelve rows of the tiny task, and pairs of 24 prompts."""
    folder = tmp_path_factory.mktemp("few")
    few = {"model": tiny["model"]}
    for split in ("train", "val"):
        few[split] = folder / f"{split}.parquet"
        pq.write_table(pq.read_table(tiny[split])[:12], few[split])
    pairs = folder / "pairs.jsonl"
    rows = ({"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": "0"} for i in range(24))
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return few, pairs


@pytest.mark.parametrize(("page", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_command_of_a_page_runs_small(page, words, files, forks, tmp_path):
    (tmp_path / "my_reward.py").write_text(REWARD)
    arguments, log = small(words, *files), tmp_path / "log"
    code = forks.start(VALOR, *arguments, log=log, cwd=tmp_path).wait(300.0)
    assert code == 0, f"{page}: valor {' '.join(arguments)}\n{log.read_text()[-3000:]}"


def test_there_are_such_commands():
    assert len(commands()) >= 15
