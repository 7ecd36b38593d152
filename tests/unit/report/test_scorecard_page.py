"""The page of a scorecard: what it says, and that a browser draws it, on a phone and on a desk, without a complaint."""

import json

import pytest
import torch
from chromium import BROWSER

from valor.lab.scorecard import Branches, Judged, scorecard
from valor.report.lab_pages import _knowledge, scorecard_page

HOSTILE = "</script><script>window.hacked = true</script>"


def card(*, branches: bool = True, all_right: bool = False) -> dict:
    """Of 120 answers to 30 prompts, in two turns, by a critic that grows surer along the way."""
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(120, generator=generator) < 0.6
    mask = torch.ones(120, 24)
    mask[:, 10:12] = 0
    returns = right.float()[:, None] * mask
    sure = torch.linspace(0, 0.35, 24)
    noise = torch.randn(120, 24, generator=generator) * 0.3
    values = (0.55 + torch.where(right[:, None], sure, -sure) + noise) * mask
    rows, tokens = torch.arange(40).repeat_interleave(4), torch.tensor([0, 6, 15, 23]).repeat(40)
    truth = (torch.rand(160, 8, generator=generator) < values[rows, tokens, None]).float()
    if all_right:
        right = torch.ones_like(right)
    found = Branches(rows, tokens, truth, truth.roll(1, 0)) if branches else None
    facts = {"critic": f"runs/{HOSTILE}", "policy": "runs/policy", "data": ["val.parquet"], "temperature": 1.0}
    numbers = scorecard(Judged(values, returns, mask, right, [i // 4 for i in range(120)]), found)
    return {**facts, "gamma": 1.0, "seed": 0, "command": f"valor critic score {HOSTILE}", **numbers}


def test_the_page_has_the_numbers_and_leaves_out_what_there_is_not():
    full, bare = card(), card(branches=False, all_right=True)
    page = scorecard_page(full)
    assert f"{full['auc']['value']:.3f}" in page and HOSTILE not in page
    assert 'id="plot-turns-auc"' in page and 'id="plot-scatter"' in page and 'id="plot-lambdas"' in page
    page = scorecard_page(bare)
    assert ">none</b>" in page and 'id="plot-scatter"' not in page
    assert "too few for an interval; 120 right and 0 wrong answers" in page and "none to none" not in page
    json.dumps(full, allow_nan=False)


def test_one_right_answer_makes_no_curve_of_auc():
    few = card()
    for point in (*few["positions"], *few["turns"]):
        point["auc"], point["right"]["count"] = 1.0, 1
    page = scorecard_page(few)
    assert 'id="plot-turns-auc"' not in page and 'id="plot-turns-explained_variance"' in page
    few["turns"][1]["right"]["count"] = 5
    assert 'id="plot-turns-auc"' in scorecard_page(few)


@pytest.mark.parametrize("worst", [0.3, -4.0])
def test_the_axes_mean_the_same_on_every_card(worst):
    """AUC from 0, explained variance from just below 0 or, of a critic that misleads, from -1.05; chance is drawn."""
    one = card()
    for place in one["positions"]:
        place["explained_variance"] = worst
    area, fit = _knowledge("along", range(11), one["positions"], "share")
    assert area["layout"]["yaxis"]["range"] == [0.0, 1.05] and area["layout"]["shapes"][0]["y0"] == 0.5
    assert fit["layout"]["yaxis"]["range"][1] == 1.05 and fit["layout"]["shapes"][0]["y0"] == 0.0
    assert fit["layout"]["yaxis"]["range"][0] == (-1.05 if worst < 0 else pytest.approx(-0.1))


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize(
    ("width", "phone", "dark", "bare"),
    [(1280, False, False, False), (390, True, True, False), (320, True, False, False), (1280, False, False, True)],
    ids=["desktop, light", "phone, dark", "narrow phone", "all right, no branches"],
)
def test_a_browser_draws_it(browse, tmp_path, width, phone, dark, bare):
    file = tmp_path / "scorecard.html"
    file.write_text(scorecard_page(card(branches=not bare, all_right=bare)), encoding="utf-8")
    with browse(width=width, height=844, phone=phone, dark=dark) as page:
        page.open(file)
        page.wait_for("document.documentElement.dataset.ready === 'yes'")
        empty = page.run(
            "return [...document.querySelectorAll('.plot')]"
            ".filter(one => !one.querySelector('.scatterlayer .js-line, .scatterlayer .point, .barlayer .point'))"
            ".map(one => one.id)"
        )
        assert empty == []
        right = "document.querySelector('.panel').getBoundingClientRect().right"
        inside = f"[...document.querySelectorAll('.xtitle')].every(one => one.getBoundingClientRect().right < {right})"
        assert page.run(f"return {inside}") or width > 720
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.run("return performance.getEntriesByType('resource').length") == 0
        assert page.run("return window.hacked === undefined") and page.console() == []


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
def test_without_scripts_there_are_tables(browse, tmp_path):
    file = tmp_path / "scorecard.html"
    file.write_text(scorecard_page(card()), encoding="utf-8")
    with browse(scripts=False) as page:
        page.open(file)
        shown = [bool(page.shown(f"#panel-{name} table")) for name in ("separation", "calibration", "turns-auc")]
        assert shown == [True, True, True] and not page.shown(".plot")
