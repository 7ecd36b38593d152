"""What people bring from verl's guides: dataset classes, traces, prompts that search, components that are compared."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import read_metrics
from test_bad_input import stops_with

from valor.trainer.main_ppo import main

pytestmark = pytest.mark.slow

DATASET = """
import pyarrow.parquet as pq

class Mine:
    def __init__(self, data_files, tokenizer, processor, config, max_samples=-1):
        assert processor is None and config.get("prompt_key") == "prompt" and tokenizer.eos_token_id is not None
        self.rows = [row for file in data_files for row in pq.read_table(file).to_pylist()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        row = self.rows[i]
        return {**row, "raw_prompt": row.pop("prompt")}
"""


def test_a_run_with_a_dataset_class_and_traces(overrides, tmp_path):
    (tmp_path / "mine.py").write_text(DATASET)
    traces = tmp_path / "traces"
    own = [f"data.custom_cls.path={tmp_path / 'mine.py'}", "data.custom_cls.name=Mine"]
    steps = ["global_profiler.tool=torch", "global_profiler.steps=[2]", f"global_profiler.save_path={traces}"]
    roles = ["actor_rollout_ref.actor.profiler.enable=true", "global_profiler.roles=[actor,rollout]"]
    assert main(overrides(tmp_path / "own", "trainer.total_training_steps=3", *own, *steps, *roles)) == 0
    assert main(overrides(tmp_path / "files", "trainer.total_training_steps=3")) == 0
    assert read_metrics(tmp_path / "own") == read_metrics(tmp_path / "files")
    assert [folder.name for folder in traces.iterdir()] == ["step_2"]
    names = {file.name for file in (traces / "step_2").iterdir()}
    updates = {f"rank0.actor.update.{call}.json.gz" for call in (1, 2)}
    assert updates < names and not any("critic" in name for name in names)
    events = json.loads(gzip.decompress((traces / "step_2" / min(updates)).read_bytes()))["traceEvents"]
    assert any("backward" in str(event.get("name", "")).lower() for event in events)
    rows = read_metrics(tmp_path / "own")[1:]
    assert all(row["actor/ppo_ratio_min"] <= row["actor/ppo_ratio_mean"] <= row["actor/ppo_ratio_max"] for row in rows)
    assert all(row["actor/ppo_ratio_min"] < 1 < row["actor/ppo_ratio_max"] for row in rows)


@pytest.mark.parametrize(
    ("code", "words"), [("class Other: pass", "has no 'Mine'"), ("class Mine: pass", "fails (TypeError")]
)
def test_a_dataset_class_that_is_no_good(code, words, overrides, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(code)
    own = [f"data.custom_cls.path={tmp_path / 'mine.py'}", "data.custom_cls.name=Mine"]
    stops_with(overrides(tmp_path / "run", *own), tmp_path / "run", capsys, words, "mine.py")


def test_a_prompt_that_searches_needs_an_agent(overrides, tiny, tmp_path, capsys):
    row = pq.read_table(tiny["train"])[:1].to_pylist()[0]
    row["prompt"] = [{"role": "user", "content": "You may <search> query </search>. 1+1="}]
    pq.write_table(pa.Table.from_pylist([row] * 8), tmp_path / "search.parquet")
    own = [f"data.train_files={tmp_path / 'search.parquet'}", "data.max_prompt_length=64"]
    arguments = overrides(tmp_path / "run", *own)
    stops_with(arguments, tmp_path / "run", capsys, "<search>", "do_search=true")


@pytest.mark.parametrize(
    ("loop", "key"),
    [
        ("tool_agent", "multi_turn.enable=true"),
        ("gateway_agent", "default_agent_loop=gateway_agent"),
        ("mine", "agent_loop_config_path"),
    ],
)
def test_a_row_that_names_a_loop_needs_a_run_that_plays_episodes(loop, key, overrides, tiny, tmp_path, capsys):
    rows = pq.read_table(tiny["train"])[:8].to_pylist()
    names = ["single_turn_agent", None, loop]
    rows = [{**row, "agent_name": names[i % 3]} for i, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "loops.parquet")
    arguments = overrides(tmp_path / "run", f"data.train_files={tmp_path / 'loops.parquet'}")
    stops_with(arguments, tmp_path / "run", capsys, f"data row 2 has agent_name '{loop}'", key)


def test_components_are_looked_for_before_the_first_rollout(overrides, tmp_path, capsys):
    gdpo = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[short,styl]"]
    own = f"reward.custom_reward_function.path={Path(__file__).with_name('component_reward.py')}"
    stops_with(overrides(tmp_path / "run", *gdpo, own), tmp_path / "run", capsys, "'styl'", "components are")


def test_more_than_a_machine_has_is_told_at_once(overrides, tmp_path, capsys, cluster):
    asked = ["trainer.controller=ray", "trainer.device=cuda", "trainer.n_gpus_per_node=64"]
    stops_with(overrides(tmp_path / "run", *asked), tmp_path / "run", capsys, "1 nodes of", "64 GPUs")


def test_a_plan_that_nobody_reads_to_its_end(tiny):
    settings = ["--dry-run", *(f"{role}.model.path={tiny['model']}" for role in ("actor_rollout_ref", "critic"))]
    code = f"from valor.trainer.main_ppo import main; import sys; sys.exit(main({settings}))"
    command = f'{sys.executable} -c "{code}" | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ)
    assert done.stderr == "" and done.returncode in (0, 141)
