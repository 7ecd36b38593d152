"""Episodes as files: what a step has played, found again by its key."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from valor.agents.chat import Chat
from valor.agents.episode import Episode, Turn, episode_rows
from valor.collector.episode_files import EpisodeFiles
from valor.config import load
from valor.data.batch import Batch
from valor.errors import UserError
from valor.lab.arithmetic import make_tokenizer
from valor.rollout.base import Span


def files(key: str, folder: Path) -> EpisodeFiles:
    """Those of a run with this key."""
    config = load(["data.train_files=x", "actor_rollout_ref.model.path=m", "do_search=true", f"{key}={folder}"]).config
    agents: Any = SimpleNamespace(schemas={"search_agent": []}, chat=Chat(make_tokenizer()))
    return EpisodeFiles(config, agents)


def test_files_hold_a_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = files("trainer.episode_data_dir", Path("kept"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")  # as a tool may
    turn = Turn([5, 6], [-0.5, -0.25], (Span(2, 2),))
    rows = episode_rows([Episode((7, 3, 0), (turn,), "stop", [3, 4])])
    kept.begin("3")
    kept.write(_prompts(7), rows)
    assert len((tmp_path / "kept" / "3.jsonl").read_text().splitlines()) == 1

    replayed = files("actor_rollout_ref.rollout.agent.replay_dir", tmp_path / "kept")
    replayed.begin("3")
    again = replayed.replayed(_prompts(7))
    assert again is not None and again["responses"].tolist() == rows["responses"].tolist() == [[5, 6]]
    with pytest.raises(UserError, match=r"3\.jsonl has no episode 0 of step 3 with trainer\.seed=8"):
        replayed.replayed(_prompts(8))
    with pytest.raises(UserError, match=r"3\.jsonl has another prompt for episode 0 of step 3"):
        replayed.replayed(_prompts(7, "2+2="))
    with pytest.raises(UserError, match=r"4\.jsonl': No such file"):
        replayed.begin("4")
    (tmp_path / "kept" / "5.jsonl").write_text('{"input": 1}\n')
    with pytest.raises(UserError, match=r"5\.jsonl' holds no records"):
        replayed.begin("5")


def _prompts(seed: int, question: str = "1+1=") -> Batch:
    return Batch({"episode_key": torch.tensor([[seed, 3, 0]])}, {"messages": [[{"role": "user", "content": question}]]})
