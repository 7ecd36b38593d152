"""Episodes as files: what a step has played, found again by key and temperature."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from valor.collector.episode_files import EpisodeFiles
from valor.config import load
from valor.data.batch import Batch
from valor.errors import UserError
from valor.rollout.base import SamplingParams


def files(key: str, folder: Path) -> EpisodeFiles:
    """Those of a run with this key."""
    config = load(["data.train_files=x", "actor_rollout_ref.model.path=m", "do_search=true", f"{key}={folder}"]).config
    agents: Any = SimpleNamespace(schemas={"search_agent": []})
    return EpisodeFiles(config, agents)


def test_files_hold_a_step_and_know_a_greedy_baseline_from_a_sample(tmp_path):
    kept = files("trainer.episode_data_dir", tmp_path / "kept")
    sample, greedy = ({"key": [7, 3, 0], "temperature": heat} for heat in (1.0, 0.0))
    kept.begin("3")
    for record in (sample, greedy):
        rows = Batch({}, {"episode_record": [record, None]})
        kept.write(rows)
        assert "episode_record" not in rows
    assert len((tmp_path / "kept" / "3.jsonl").read_text().splitlines()) == 2

    replayed = files("actor_rollout_ref.rollout.agent.replay_dir", tmp_path / "kept")
    replayed.begin("3")
    prompts = Batch({"episode_key": torch.tensor([[7, 3, 0]])})
    assert replayed.recorded(prompts, SamplingParams(temperature=0.0)).objects == {"recorded": [greedy]}
    assert replayed.recorded(prompts, SamplingParams(temperature=1.0)).objects == {"recorded": [sample]}
    with pytest.raises(UserError, match=r"3\.jsonl has no episode 0 of step 3 with trainer\.seed=8"):
        replayed.recorded(Batch({"episode_key": torch.tensor([[8, 3, 0]])}), SamplingParams())
    with pytest.raises(UserError, match=r"4\.jsonl': No such file"):
        replayed.begin("4")
    (tmp_path / "kept" / "5.jsonl").write_text('{"input": 1}\n')
    with pytest.raises(UserError, match=r"5\.jsonl' holds no records"):
        replayed.begin("5")
