"""A role is a worker class, a row of the table of roles, and the phase that calls it: nothing else knows its name."""

import json

from valor.data.batch import Batch
from valor.trainer.main_ppo import main
from valor.workers import roles
from valor.workers.dispatch import Dispatch


class BonusWorker:
    """A rank that gives each response 0.5."""

    def __init__(self, context, *, config, facts) -> None:
        self.data_parallel_rank = context.rank

    @Dispatch("dp", reads=("response_lengths",))
    def bonuses(self, batch: Batch) -> Batch:
        return Batch({"bonus": batch["response_lengths"] * 0.0 + 0.5})


PHASE = """
from valor.data.batch import Batch
from valor.trainer.phases.base import Phase

class Bonus(Phase):
    name, role = "bonus", "bonus"
    reads, adds = frozenset(["response_lengths", "token_level_scores"]), frozenset(["token_level_scores"])

    def run(self, batch, step):
        bonus = self.resources.roles["bonus"].bonuses(batch)["bonus"]
        scores = batch["token_level_scores"] + bonus[:, None]
        return Batch({"token_level_scores": scores}), {"bonus": float(bonus.mean())}

def phases(standard, config):
    return [Bonus(config), *standard]
"""


def test_a_worker_a_row_and_a_phase_are_a_role(overrides, tmp_path, monkeypatch, capsys):
    file = tmp_path / "bonus.py"
    file.write_text(PHASE)
    run = overrides(tmp_path / "run", f"algorithm.phases_path={file}", "trainer.total_training_steps=1")
    assert main(run) == 2 and "runs in the role 'bonus', which this run does not have" in capsys.readouterr().err
    row = roles.Role(BonusWorker, section=lambda config: config.critic)
    monkeypatch.setitem(roles.ROLES, "bonus", row)
    assert main(run) == 0
    assert "bonus (bonus): " in capsys.readouterr().out
    step = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert step["bonus"] == 0.5 and {path.name for path in (tmp_path / "run" / "global_step_1").iterdir()} >= {"actor"}
