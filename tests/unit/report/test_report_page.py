"""The report as text: complete, self-contained, deterministic, and closed to whatever a model writes into it."""

import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from jinja2.utils import htmlsafe_json_dumps
from synthetic_run import HOSTILE, make_run

from valor.report import skeleton
from valor.report.page import build_report
from valor.tracking.generations import Sample, write_samples


class Outline(HTMLParser):
    """The elements of a page: how many of each, their ids, what they load, and the text of each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self._in_script = tag == "script"
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "srcset", "action", "data") and not (value or "").startswith("#"):
                self.loads.append(value or "")

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts.append(data)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "ppo", steps=40)


@pytest.fixture(scope="module")
def page(run_dir):
    path = build_report(run_dir)
    assert path == run_dir / "report.html"
    return path.read_text(encoding="utf-8")


def embedded(page: str) -> dict:
    match = re.search(r'<script type="application/json" id="run-data">(.*?)</script>', page, re.S)
    assert match
    return json.loads(match[1])


def test_every_picture_has_its_frame(page):
    outline = Outline(page)
    data = embedded(page)
    assert len(outline.ids) == len(set(outline.ids))
    for figure in data["figures"]:
        assert f"panel-{figure['id']}" in outline.ids and f"plot-{figure['id']}" in outline.ids
        assert all(one["curve"] in data["metrics"]["curves"] for one in figure["traces"] if "curve" in one)
    wanted = {"reward", "validation", "kl", "policy-loss", "value-loss", "explained-variance", "response-length"}
    wanted |= {"entropy", "grad-norm", "rollout-gap"}
    assert wanted <= {figure["id"] for figure in data["figures"]}
    assert "plot-timing" in outline.ids and {"samples", "config", "metrics"} <= set(outline.ids)


def test_curves_hold_the_numbers_of_the_run(page, run_dir):
    data = embedded(page)
    place, values = data["metrics"]["curves"]["actor/grad_norm"]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    written = {record["step"]: record["actor/grad_norm"] for record in records if "actor/grad_norm" in record}
    assert data["metrics"]["steps"][place] == list(written)
    assert values == [None if value is None else float(f"{value:.6g}") for value in written.values()]
    assert None in values  # the step whose gradient was not finite


def test_a_tile_says_what_its_chart_says(page):
    tiles = dict(re.findall(r'<div class="tile"><span>(.*?)</span><b>(.*?)</b>', page))
    names = [one.get("name", "") for figure in embedded(page)["figures"] for one in figure["traces"]]
    assert {f"score {tiles['Reward']}", f"explained variance {tiles['Explained variance']}"} <= {*names}
    assert f"gsm8k mean@4 {tiles['Validation, gsm8k']}" in names


def test_samples_open_where_there_is_something_to_learn(tmp_path):
    make_run(tmp_path, steps=4)
    same, other = Sample("2+3=", ["5"], 1.0, uid="a"), Sample("2+3=", ["6"], 0.0, uid="a")
    for step, samples in {1: [other, other], 2: [same, other], 3: [same, same], 4: [same]}.items():
        write_samples(tmp_path, step, samples)
    page = build_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r"<option value=\"\d+\" selected>(.*?)</option>", page) == ["step 2"]


def test_tokens_are_coloured_by_what_a_teacher_makes_of_them(tmp_path):
    make_run(tmp_path, steps=1, critic=False)
    gaps = Sample("2+3=", ["5", "!", "?"], 1.0, log_probs=[-0.5, -1.0, None], teacher_log_probs=[-2.5, -0.5, None])
    write_samples(tmp_path, 1, [gaps])
    page = build_report(tmp_path).read_text(encoding="utf-8")
    assert re.findall(r'<button type="button" value="(\w+)"', page) == ["log_probs", "teacher_gaps"]
    styles = re.findall(r'<span[^>]*style="([^"]*--[tm][^"]*)"[^>]*>(.)', page)
    assert {(re.findall(r"--[tm]:[0-9.]+", style)[0], token) for style, token in styles} == {
        ("--t:1.00", "5"),
        ("--m:1.00", "!"),
    }
    assert "log-prob minus teacher" in page


def test_names_say_which_run_and_which_model(tmp_path):
    run_dir = make_run(tmp_path / "lookup" / "ppo", steps=2)
    config = (run_dir / "config.yaml").read_text().replace("smollm2-ppo-critic", "run")
    config = config.replace("HuggingFaceTB/SmolLM2-135M-Instruct", "/models/runs/warm/huggingface/actor")
    (run_dir / "config.yaml").write_text(config)
    page = build_report(run_dir).read_text(encoding="utf-8")
    assert "<h1>lookup/ppo</h1>" in page and "<li>actor warm</li><li>critic warm</li>" in page


def test_a_critic_free_run_has_no_critic_section(tmp_path):
    page = build_report(make_run(tmp_path / "grpo", steps=6, critic=False)).read_text(encoding="utf-8")
    outline = Outline(page)
    assert "critic" not in outline.ids and "plot-value-loss" not in outline.ids
    assert "plot-reward" in outline.ids
    assert "--v:" not in page and "--g:" in page


def test_nothing_is_loaded_from_elsewhere(page):
    outline = Outline(page)
    assert outline.loads == ["data:,"]  # the icon
    assert outline.counts["script"] == 3 and "iframe" not in outline.counts
    assert "default-src 'none'" in page


def test_model_text_cannot_leave_its_place(page):
    assert HOSTILE.strip() not in page
    assert page.count("</script>") == 3
    texts = [
        html.unescape(re.sub("<.*?>", "", one)) for one in re.findall(r'<div class="tokens">(.*?)</div>', page, re.S)
    ]
    assert any(HOSTILE.strip() in text for text in texts)  # and yet it is all there
    assert "<b>not bold</b>" not in page and "&lt;b&gt;not bold&lt;/b&gt; &amp; unset" in page


def test_embedded_json_closes_nothing():
    nasty = {"<!--<script>": "</script> & ]]> \u2028 🙂"}
    text = htmlsafe_json_dumps(nasty)
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == nasty


def test_names_and_settings_are_escaped(tmp_path):
    run_dir = make_run(tmp_path / "a<b>&c", steps=2)
    config = (run_dir / "config.yaml").read_text().replace("smollm2-ppo-critic", "'</title><script>x</script>'")
    (run_dir / "config.yaml").write_text(config)
    assert "<script>x" not in build_report(run_dir).read_text(encoding="utf-8")


def test_same_files_same_page(page, run_dir):
    assert build_report(run_dir).read_text(encoding="utf-8") == page


def test_a_bare_metrics_file_is_enough(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mine/odd": 3.0}\n')
    page = build_report(tmp_path).read_text(encoding="utf-8")
    outline = Outline(page)
    assert not [one for one in outline.ids if one.startswith("plot-") and one != "plot-explorer"]
    assert "samples" not in outline.ids


def test_flattened_settings_read_as_typed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "mine/odd": 3.0}\n')
    (tmp_path / "config.yaml").write_text("a: {b: null, c: [1, x, true], d: {}}\ne: 1.0e-06\nf: false\n")
    page = build_report(tmp_path).read_text(encoding="utf-8")
    settings = re.findall(r'<th scope="row">(.*?)</th><td>(.*?)</td>', page.partition('id="config"')[2])
    assert [(key, html.unescape(value)) for key, value in settings] == [
        ("a.b", "null"),
        ("a.c", '[1, "x", true]'),
        ("a.d", "{}"),
        ("e", "1e-06"),
        ("f", "false"),
    ]


def test_building_a_report_does_not_import_torch():
    check = "import valor.report.page, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


def test_without_plotly_the_page_has_its_tables_and_a_line_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    skeleton._packed_plotly.cache_clear()
    try:
        make_run(tmp_path)
        text = build_report(tmp_path).read_text()
        build_report(tmp_path)
    finally:
        skeleton._packed_plotly.cache_clear()
    assert "<table" in text and caplog.text.count("pip install plotly") == 1
