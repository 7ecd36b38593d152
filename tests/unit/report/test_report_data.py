"""Reading a run folder, and what the pictures are made of, against small folders written by hand."""

import json

import pytest

from valor.errors import UserError
from valor.report.page import build_report
from valor.report.pictures import panels, timing
from valor.report.run_data import Series, as_series, evenly_spaced, read_run, read_samples, read_steps, thin
from valor.tracking.generations import Sample, write_samples
from valor.tracking.rundir import write_run_info


def write_metrics(path, *records, tail=""):
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail, encoding="utf-8")
    return path


def test_lines_of_one_step_are_merged_and_an_unfinished_one_is_left_out(tmp_path):
    path = write_metrics(
        tmp_path / "metrics.jsonl",
        {"step": 2, "loss": None},
        {"step": 1, "loss": 0.5, "val-core/x/acc/mean@1": 0.1},
        {"step": 2, "val-core/x/acc/mean@1": 0.3},
        {"step": 1, "loss": 0.25},
        tail='{"step": 3, "loss": 0.',
    )
    assert as_series(read_steps(path))[0] == {
        "loss": Series([1, 2], [0.25, None]),
        "val-core/x/acc/mean@1": Series([1, 2], [0.1, 0.3]),
    }


def test_numbers_that_are_not_finite_are_gaps_of_a_page(tmp_path):
    """Other programs write NaN and Infinity, which are no JSON."""
    lines = ('{"step": 1, "timing_s/step": NaN, "loss": 1}', '{"step": 2, "loss": -Infinity, "a": Infinity}')
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert as_series(read_steps(tmp_path / "metrics.jsonl"))[0]["loss"] == Series([1, 2], [1, None])
    data = build_report(tmp_path).read_text().partition('id="run-data">')[2].partition("</script>")[0]
    assert "NaN" not in data and "Infinity" not in data


@pytest.mark.parametrize(
    ("line", "message"),
    [("{half\n", "line 2 is not JSON"), ('{"loss": 1}\n', "line 2 has no step"), ("[1]\n", "line 2 has no step")],
)
def test_damage_in_the_middle_is_reported(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '{"step": 3}\n')
    with pytest.raises(UserError, match=message):
        as_series(read_steps(path))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.yaml", b"a: [1,\n", r"config\.yaml, line 2: not valid yaml"),
        ("samples/step_1.jsonl", b'{"step": 1}\n', r"step_1\.jsonl holds no samples of a run"),
        ("samples/step_1.jsonl", b'{"step": 1, "prompt": 3, "tokens": []}\n', "holds no samples of a run"),
        ("metrics.jsonl", b'{"step": 1, "loss": 1}\n\xff\xfe\n', "line 2 is not JSON"),
    ],
)
def test_other_files_in_the_place_of_a_run_s_are_told_in_a_line(tmp_path, name, text, message):
    (tmp_path / "samples").mkdir()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1}\n')
    (tmp_path / name).write_bytes(text)
    with pytest.raises(UserError, match=message):
        read_run(tmp_path)


def test_a_folder_without_metrics_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl.*trainer\.logger"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    for text in ("", '{"step": 1, "data": {"loss": 1.0}}\n'):  # the second is verl's form
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(UserError, match=r"metrics\.jsonl holds no metrics"):
            read_run(tmp_path)


def test_a_run_that_ended_in_its_first_step_has_a_report_that_says_why(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    write_run_info(tmp_path, stopped="8 of 8 samples could not be graded")
    page = build_report(tmp_path).read_text()
    assert "The run ended early: 8 of 8 samples could not be graded." in page and "Too early to say" not in page
    assert "Mend that, and start it again." in page
    assert "Every metric" not in page and 'class="tiles"' not in page  # there are none


@pytest.mark.parametrize(("steps", "early"), [(4, True), (5, False)])
def test_a_run_of_few_steps_gets_no_all_clear(tmp_path, steps, early):
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": 1}}\n' for i in range(1, steps + 1)))
    page = build_report(tmp_path).read_text()
    assert ("Too early to say: most checks compare 5 steps or more" in page) == early
    assert ("Nothing: none of the" in page) != early


def test_thinning_keeps_every_spike_and_both_ends():
    values: list[float | None] = [0.0] * 10_000
    values[1234], values[8765], values[5000] = 9.0, -9.0, None
    thinned = thin(Series(list(range(10_000)), values), limit=100)
    assert len(thinned.steps) <= 100
    assert thinned.steps == sorted(thinned.steps)
    picked = dict(zip(thinned.steps, thinned.values, strict=True))
    assert picked[1234] == 9.0 and picked[8765] == -9.0
    assert thinned.steps[0] == 0
    short = Series([1, 2], [None, 1.0])
    assert thin(short) is short
    assert thin(Series(list(range(400)), [None] * 400), limit=100).finite() == []


def test_spread_takes_the_first_and_the_last():
    assert evenly_spaced(list(range(100)), 4) == [0, 33, 66, 99]
    assert evenly_spaced([1, 2], 8) == [1, 2]


def test_samples_are_cut_to_what_a_page_can_show(tmp_path):
    long = Sample("p" * 7000, ["x"] * 2000, 1.0, values=[0.5] * 2000, reward_info={"acc": 1})
    for step in range(20):
        write_samples(tmp_path, step, [long] * 10)
    write_samples(tmp_path, 3, [long], split="val")
    (tmp_path / "samples" / "other.jsonl").write_text("not ours\n")
    groups = read_samples(tmp_path)
    assert [(group["step"], group["split"]) for group in groups[-2:]] == [(19, "train"), (3, "val")]
    assert len(groups) == 9 and groups[0]["step"] == 0
    assert len(groups[0]["records"]) == 8 and groups[0]["available"] == 10
    record = groups[0]["records"][0]
    assert len(record["tokens"]) == len(record["values"]) == 1500
    assert record["tokens_left_out"] == 500
    assert record["prompt"] == "[…] " + "p" * 6000
    assert record["reward_info"] == {"acc": 1}


def lines(panel: dict) -> list[tuple[str, str]]:
    """Name in the legend, and metric, of each line."""
    return [(trace["name"], trace["curve"]) for trace in panel["traces"]]


def seconds(metrics: dict[str, Series]) -> dict[str, list[float]]:
    """Seconds of each phase in the bars of the timing figure."""
    [figure] = timing(metrics)
    return {trace["name"].rpartition(" ")[0]: trace["y"] for trace in figure["traces"]}


def test_only_panels_with_data_are_drawn():
    ids = [
        spec["id"]
        for spec in panels(
            {
                "critic/score/mean": Series([1], [0.5]),
                "critic/vf_loss": Series([1], [None]),  # never finite: nothing to draw
                "val-core/openai/gsm8k/acc/mean@1": Series([1], [0.5]),
                "val-core/openai/gsm8k/acc/pass@4": Series([1], [0.5]),
            }
        )
    ]
    assert ids == ["reward", "validation", "validation-n"]
    assert [*panels({})] == []


def test_a_line_takes_the_first_key_that_the_run_has():
    (panel,) = panels({"actor/entropy_loss": Series([1], [0.5])})
    assert lines(panel) == [("entropy 0.500", "actor/entropy_loss")]


def test_returns_without_a_critic_are_no_picture_of_one():
    returns, values = {"critic/returns/mean": Series([1], [0.5])}, {"critic/values/mean": Series([1], [0.4])}
    assert [*panels(returns)] == []
    assert [spec["id"] for spec in panels(returns | values)] == ["values-returns"]


def test_equal_curves_are_drawn_once():
    score = Series([1, 2], [0.5, 0.75])
    (same,) = panels({"critic/score/mean": score, "critic/rewards/mean": Series([1, 2], [0.5, 0.75])})
    (other,) = panels({"critic/score/mean": score, "critic/rewards/mean": Series([1, 2], [0.5, 0.7])})
    assert [key for _, key in lines(same)] == ["critic/score/mean"]
    assert [key for _, key in lines(other)] == ["critic/score/mean", "critic/rewards/mean"]


def test_validation_labels_name_the_source_only_where_there_are_several():
    one = {"val-core/openai/gsm8k/acc/mean@4": Series([0], [0.5])}
    two = {**one, "val-core/lighteval/MATH/acc/mean@4": Series([0], [0.25])}
    assert [name for name, _ in lines(next(panels(one)))] == ["mean@4 0.500"]
    assert [name for name, _ in lines(next(panels(two)))] == ["MATH mean@4 0.250", "gsm8k mean@4 0.500"]


def test_timing_puts_phases_in_order_and_the_rest_in_other():
    metrics = {
        "timing_s/step": Series([1, 2], [10.0, 12.0]),
        "timing_s/update_actor": Series([1, 2], [3.0, 4.0]),
        "timing_s/gen": Series([1, 2], [6.0, 5.0]),
        "timing_s/testing": Series([2], [2.5]),
        "timing_s/my_phase": Series([1], [0.5]),
        "timing_s/ref": Series([1, 2], [0.0, 0.0]),
    }
    assert list(seconds(metrics).items()) == [
        ("generate", [6.0, 5.0]),
        ("train actor", [3.0, 4.0]),
        ("validate", [0, 2.5]),
        ("my phase", [0.5, 0]),
        ("other", [0.5, 3.0]),
    ]
    assert [*timing({"timing_s/step": Series([1], [1.0])})] == []
    assert [*timing({"timing_s/step": Series([1], [None]), "timing_s/testing": Series([0], [3.0])})] == []


def test_timing_shows_what_the_step_waited_for():
    """Values took 3 s, 2.5 of them while old log-probs were computed: the bar is as high as the step is long."""
    metrics = {
        "timing_s/step": Series([1], [5.0]),
        "timing_s/old_log_prob": Series([1], [4.0]),
        "timing_s/values": Series([1], [3.0]),
        "timing_hidden_s/values": Series([1], [2.5]),
    }
    assert seconds(metrics) == {"old log-probs": [4.0], "values": [0.5], "other": [0.5]}


def test_timing_of_a_long_run_shows_some_of_its_steps():
    steps = list(range(1, 301))
    metrics = {"timing_s/step": Series(steps, [2.0] * 300), "timing_s/gen": Series(steps, [2.0] * 300)}
    [figure] = timing(metrics)
    assert (figure["traces"][0]["x"][0], figure["traces"][0]["x"][-1]) == ("1", "300")
    assert seconds(metrics) == {"generate": [2.0] * 120} and figure["numbers"][1] == [["generate", "600", "100.0%"]]
