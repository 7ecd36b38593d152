"""Several runs in one page: their curves side by side, where they end, and in what their settings differ."""

import json
import re

import pytest
from chromium import BROWSER
from synthetic_run import make_run

from valor.cli import main
from valor.errors import UserError
from valor.report.page import build_comparison


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    made = [make_run(folder / name, steps=6, critic=name == "ppo", seed=i) for i, name in enumerate(("ppo", "grpo"))]
    for run in made:
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("smollm2-ppo-critic", f"<{run.name}>"))
    return made


def test_every_run_is_in_every_picture_that_it_has_numbers_for(runs, tmp_path):
    page = build_comparison(runs, tmp_path / "both.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'id="run-data">(.*?)</script>', page, re.S)[1])
    panels = {one["id"]: [line["label"] for line in one["lines"]] for one in data["panels"]}
    assert panels["reward"] == ["<ppo>", "<grpo>"] and panels["value-loss"] == ["<ppo>"]
    titles = {one["id"]: one["title"] for one in data["panels"]}
    assert titles["value-error"] == "Value error along the response: first fifth" and titles["entropy"] == "Entropy"
    for run in runs:
        records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        written = [float(f"{one['critic/score/mean']:.6g}") for one in records if "critic/score/mean" in one]
        assert data["metrics"]["curves"][f"critic/score/mean · <{run.name}>"][1] == written
    differing = page.partition("What differs</h2>")[2]
    assert set(re.findall(r'<th scope="row">(.*?)</th>', differing)) == {
        "algorithm.adv_estimator",
        "trainer.experiment_name",
    }
    assert "<grpo>" not in page and "&lt;grpo&gt;" in page


def test_a_picture_compares_one_line_of_all_runs(tmp_path):
    """A KL in the loss of one run is not set beside a KL in the reward of another."""
    kinds = {"loss": {"actor/kl_loss": 1.0, "actor/reward_kl_penalty": 2.0}, "reward": {"actor/reward_kl_penalty": 3.0}}
    for name, metrics in kinds.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, **metrics}) + "\n")
    page = build_comparison([tmp_path / name for name in kinds], tmp_path / "both.html").read_text(encoding="utf-8")
    panels = json.loads(re.search(r'id="run-data">(.*?)</script>', page, re.S)[1])["panels"]
    (kl,) = (one for one in panels if one["id"] == "kl")
    assert kl["title"] == "KL to the reference: in the loss"
    assert [line["key"].partition(" ")[0] for line in kl["lines"]] == ["actor/kl_loss"]


def test_runs_of_one_name_are_called_by_their_folders(tmp_path):
    same = [make_run(tmp_path / "tries" / name, steps=2) for name in ("first", "second")]
    page = build_comparison(same, tmp_path / "both.html").read_text(encoding="utf-8")
    assert "<h1>first and second</h1>" in page


def test_one_run_cannot_be_compared(runs, tmp_path, capsys):
    with pytest.raises(UserError, match="two runs or more"):
        build_comparison([runs[0], runs[0]], tmp_path / "one.html")
    assert main(["report", "--compare", *map(str, runs), "--out", str(tmp_path / "two.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'two.html'}\n"
    file = tmp_path / "two.html"
    assert main(["report", "--compare", *map(str, runs), "--out", str(file / "three.html")]) == 2
    assert capsys.readouterr().err.startswith(f"'{file}': File exists: move it away, or choose another folder")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_the_page_opens(runs, browse, tmp_path):
    with browse(width=390, height=844, phone=True, dark=True) as page:
        page.open(build_comparison(runs, tmp_path / "both.html"))
        page.wait_for("document.documentElement.dataset.ready === 'yes'")
        assert page.run("return document.querySelectorAll('#plot-reward .scatterlayer .trace').length") == 2
        assert page.run("return document.documentElement.scrollWidth") <= 390
        assert page.console() == []
