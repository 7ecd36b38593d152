"""The phases in examples/phases that need no model: what they draw, and what they leave out."""

from pathlib import Path

import pytest
import torch

from phase_runs import after
from valor.config import PPOConfig
from valor.data.batch import Batch
from valor.trainer.phases.training_rows import trained
from valor.user_files import load_file

EXAMPLES = Path(__file__).parents[3] / "examples" / "phases"


def config(**critic: object) -> PPOConfig:
    return PPOConfig.model_validate({"critic": critic, "trainer": {"seed": 42}})


def test_answers_are_drawn_by_their_scores_as_seed_and_step_say() -> None:
    phase = load_file(str(EXAMPLES / "resampling.py"), "path").Resampling(config())
    scores = torch.tensor([0.0, 1.0, 2.0] * 100)
    columns = {"token_level_scores": scores[:, None], "response_mask": torch.ones(300, 1), "same": scores}
    batch = Batch(columns | {"response_lengths": torch.ones(300).long()})
    (drawn, metrics), (again, _), (other, _) = (after(phase, batch, step) for step in (1, 1, 2))
    drawn, again, other = (trained(rows)["same"].tolist() for rows in (drawn, again, other))
    assert drawn == again != other and len(drawn) == 300
    assert 0.0 not in drawn and 0.7 < drawn.count(2.0) / 300 < 0.9
    assert 0 < metrics["training/pf_ppo/distinct_ratio"] < 1


def test_no_advantage_where_the_critics_agree_most() -> None:
    """Deviations rise along ten tokens: the first fifth of them loses its advantage; the padding has none."""
    module = load_file(str(EXAMPLES / "agreement_mask.py"), "path")
    phase = module.AgreementMask(config(ensemble_size=2, model={"value_head_init": "normal"}))
    apart, mask = torch.arange(12.0).view(2, 6), torch.tensor([[1.0] * 6, [1.0] * 4 + [0.0] * 2])
    columns = {"values/critic": apart, "values/critic_2": -apart, "advantages": mask.clone(), "response_mask": mask}
    batch, metrics = after(phase, Batch(columns))
    assert batch["advantages"].tolist() == [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    assert metrics == pytest.approx({"critic/agreement_masked": 0.2})
