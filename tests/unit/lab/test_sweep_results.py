"""What a sweep's results say, from runs whose numbers are known."""

import json

import pytest
from synthetic_sweep import finish, make_sweep

from valor.lab.results import compare, table, write_results

EXACT = {"plain": [0.5, 0.6, 0.7], "better": [0.6, 0.8, 0.8]}  # at the end, by seed


@pytest.fixture
def sweep(tmp_path):
    made = make_sweep(tmp_path / "s", dict.fromkeys(EXACT, 0.0))
    for run in made.runs:
        finish(run, [0.1, EXACT[run.arm][run.seed]])
    return made


def test_numbers_by_hand(sweep):
    plain, better = compare(sweep, {})["arms"]
    assert plain["last"] == pytest.approx({"mean": 0.6, "low": 0.5, "high": 0.7})
    assert plain["first"]["mean"] == pytest.approx(0.1) and plain["difference"] is None
    gap = better["difference"]
    assert gap["by_seed"] == pytest.approx([0.1, 0.2, 0.1]) and gap["mean"] == pytest.approx(0.4 / 3)
    assert gap["p_signs"] == 2 / 8
    # t = (0.4/3) / (0.057735/sqrt(3)) = 4 with two degrees of freedom: p = 1 - t/sqrt(2 + t^2)
    assert gap["p_t"] == gap["p_holm"] == pytest.approx(1 - 4 / 18**0.5)
    assert gap["significant"] is False
    assert plain["finished"]["0"]["seconds"] == pytest.approx(5 * 2.0 + 2 * 0.5)


def test_what_was_measured_once_is_no_start(sweep):
    """As `valor sft` measures its validation in one epoch: at the end."""
    for run in sweep.of("plain"):
        finish(run, [0.4])
    plain, better = compare(sweep, {})["arms"]
    assert (plain["first"]["mean"], plain["last"]["mean"]) == (None, pytest.approx(0.4))
    assert better["first"]["mean"] == pytest.approx(0.1)


def test_curves_hold_the_steps_that_all_seeds_share(sweep):
    finish(sweep.runs[0], [0.1, 0.5, 0.9])  # one seed went on for longer
    curve = compare(sweep, {})["curves"][0]["arms"]["plain"]
    assert curve["steps"] == [0, 5]
    assert curve["mean"][0] == pytest.approx(0.1) and curve["mean"][1] == pytest.approx(0.6)
    assert (curve["low"][1], curve["high"][1]) == pytest.approx((0.5, 0.7))


def test_a_run_that_failed_or_is_missing_is_named_and_the_others_are_compared(sweep):
    last = sweep.runs[-1]
    last.write("running")
    results = compare(sweep, {last.name: "exit code 1: no such file"})
    better = results["arms"][1]
    assert better["errors"] == {"2": "exit code 1: no such file"}
    assert better["difference"]["by_seed"] == pytest.approx([0.1, 0.2])  # paired by the seeds that both have
    assert "* better seed 2: exit code 1: no such file" in table(results)


def test_one_seed_gives_numbers_without_intervals(tmp_path):
    results = compare(make_sweep(tmp_path / "s", {"a": 0.5, "b": 0.6}, seeds=(4,)), {})
    assert results["arms"][1]["last"]["low"] is None
    assert results["arms"][1]["difference"]["significant"] is None
    assert "One seed" in results["notes"][0]


def test_two_seeds_that_happen_to_agree_do_not_make_a_difference(tmp_path):
    sweep = make_sweep(tmp_path / "s", dict.fromkeys(EXACT, 0.0), seeds=(0, 1))
    for run in sweep.runs:
        finish(run, [0.1, 0.5 + (0.1 + 1e-6 * run.seed) * (run.arm == "better")])
    results = compare(sweep, {})
    assert results["arms"][1]["difference"]["significant"] is None
    assert next(line for line in table(results).splitlines() if line.startswith("| better")).endswith("too few seeds |")


@pytest.mark.parametrize(("better", "verdict"), [(0.5, "no"), (0.75, "no spread")])
def test_seeds_that_all_agree_are_not_too_few(tmp_path, better, verdict):
    sweep = make_sweep(tmp_path / "s", dict.fromkeys(EXACT, 0.0))
    for run in sweep.runs:
        finish(run, [0.125, better if run.arm == "better" else 0.5])
    results = compare(sweep, {})
    assert results["arms"][1]["difference"]["p_t"] is None
    assert next(line for line in table(results).splitlines() if line.startswith("| better")).endswith(f"| {verdict} |")


def test_holm_counts_the_comparisons(tmp_path):
    arms = compare(make_sweep(tmp_path / "s", {"a": 0.3, "b": 0.9, "c": 0.32}), {})["arms"]
    b, c = (arm["difference"] for arm in arms[1:])
    assert b["p_holm"] == pytest.approx(2 * b["p_t"]) and b["significant"] is True
    assert c["p_holm"] == pytest.approx(max(c["p_t"], b["p_holm"])) and c["significant"] is False


def test_a_metric_of_one_s_own_and_one_that_is_not_there(tmp_path):
    sweep = make_sweep(tmp_path / "a", {"a": 0.5, "b": 0.6}, metric="critic/score/mean")
    assert compare(sweep, {})["arms"][0]["last"]["mean"] == pytest.approx(0.8)
    sweep = make_sweep(tmp_path / "b", {"a": 0.5, "b": 0.6}, metric="critic/scores/mean")
    assert compare(sweep, {})["arms"][0]["errors"]["0"] == (
        "it measured no critic/scores/mean; did you mean critic/score/mean?"
    )


def test_the_table_says_it_all_and_the_same_runs_give_the_same_table(sweep):
    text = table(write_results(sweep, {}))
    assert (sweep.out / "table.md").read_text() == text
    row = next(line for line in text.splitlines() if line.startswith("| better"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:5] == ["better", "3", "0.100", "0.733 (0.600 to 0.800)", "+0.133 (+0.100 to +0.200)"]
    assert cells[5:] == ["0.057", "0.25", "0.057", "no"]
    assert "| plain | 3 | 0.100 | 0.600 (0.500 to 0.700) | control | - | - | - | - |" in text  # no cell is empty
    results = json.loads((sweep.out / "results.json").read_text())
    assert results["arms"][1]["settings"] == {"algorithm.lam": "0.11"}
    write_results(sweep, {})
    assert (sweep.out / "table.md").read_text() == text


def test_a_supervised_run_is_compared_by_its_validation_loss(tmp_path):
    base = {"data": {"train_files": "t.parquet"}}
    sweep = make_sweep(tmp_path / "s", {"a": 0.5, "b": 0.6}, entry="sft", base=base, key="optim.lr")
    for run in sweep.runs:
        lines = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0, "val/loss": 1.5 + run.seed}]
        (run.folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    results = compare(sweep, {})
    assert results["arms"][0]["last"]["mean"] == 2.5
    assert [one["key"] for one in results["curves"]] == ["val/loss", "train/loss"]
