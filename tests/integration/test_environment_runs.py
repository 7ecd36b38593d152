"""Two training steps in each kind of environment: rewards of turns and outcomes arrive, and no grader is asked."""

import json
from pathlib import Path

import pytest
from runs import read_metrics

from openenv_server import serving
from valor.data.files import write_parquet
from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples/environments"
ENTRY = json.dumps({"question": "?", "answer": "12", "metadata": {"source_dataset": "leg_counting"}})
OWN = '''
from valor.agents import Env

class Short(Env):
    """Prefers turns of few characters."""

    def __init__(self, most):
        self.most, self.turns = most, 0

    def step(self, text):
        self.turns += 1
        return "again", 1.0 if len(text) < self.most else 0.0, self.turns == 2

    def score(self):
        return 0.25
'''


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "train.parquet"
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Round {i}."}],
            "data_source": "nobody/grades/this",
            "ability": "play",
            "reward_model": {"style": "rule", "ground_truth": "12"},
            "extra_info": {"index": i, "entry": ENTRY},
        }
        for i in range(16)
    ]
    write_parquet({path: rows})
    return path


def run(overrides, data: Path, run_dir: Path, environment: str, *more: str) -> list[dict[str, float]]:
    agent = "actor_rollout_ref.rollout.agent"
    common = [
        f"data.train_files={data}",
        "data.val_files=null",
        "data.max_response_length=160",
        "actor_rollout_ref.rollout.max_model_len=1000",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4",
        "data.train_batch_size=4",
        "reward.custom_reward_function.path=null",
        "trainer.total_training_steps=2",
        f"{agent}.environment={environment}",
    ]
    assert main(overrides(run_dir, *common, *more)) == 0
    return read_metrics(run_dir)


@pytest.mark.parametrize(
    ("package", "environment", "kwargs"),
    [
        ("skyrl_gym", "skyrl.py:SkyRLGym", "{name: gsm8k_multi_turn}"),
        ("textarena", "textarena_game.py:TextArena", "{game: GuessTheNumber-v0}"),
        ("reasoning_gym", "puzzle.py:ReasoningGym", "{task: leg_counting}"),
    ],
)
def test_environments_of_libraries(overrides, data, tmp_path, package, environment, kwargs):
    pytest.importorskip(package, reason=f"{package} is not installed")
    # Long enough for a policy that knows nothing to end a turn by chance.
    more = [
        "data.max_response_length=400",
        "actor_rollout_ref.rollout.agent.deterministic=true",
        f"actor_rollout_ref.rollout.agent.environment_kwargs={kwargs}",
    ]
    rows = run(overrides, data, tmp_path, f"{EXAMPLES}/{environment}", *more)
    assert rows[-1]["step"] == 2
    for row in rows[1:]:
        assert row["episode/failed"] == 0
        assert row["episode/turns/max"] > 1 and row["episode/observation_tokens"] > 0
        assert row["training/rollout_log_probs_diff_max"] < 1e-5


def test_a_server_with_fewer_sessions_than_there_are_episodes(overrides, data, tmp_path):
    with serving(5) as address:
        kwargs = "actor_rollout_ref.rollout.agent.environment_kwargs="
        kwargs += f"{{url: '{address}', unscored: -2.0}}"
        rows = run(overrides, data, tmp_path, f"{EXAMPLES}/openenv.py:OpenEnv", kwargs)
    for row in rows[1:]:
        assert row["episode/failed"] == 0 and row["critic/score/mean"] == -2.0


def test_an_environment_of_ones_own_is_validated_by_all_that_it_gives(overrides, data, tmp_path):
    (tmp_path / "short.py").write_text(OWN)
    kwargs = "actor_rollout_ref.rollout.agent.environment_kwargs={most: 1000}"
    validation = f"data.val_files={data}", "data.val_max_samples=4", "trainer.test_freq=2"
    rows = run(overrides, data, tmp_path / "run", f"{tmp_path}/short.py:Short", kwargs, *validation)
    validated = [value for key, value in rows[0].items() if key.startswith("val-") and "/reward/mean" in key]
    # 1 for each turn, of one or two, and a quarter for the episode.
    assert validated and all(1.25 <= value <= 2.25 for value in validated)
    for row in rows[1:]:
        assert row["critic/score/mean"] == pytest.approx(row["episode/turns/mean"] + 0.25)
