"""The report in a real browser, phone-sized and desktop-sized: it draws, it reacts, and the console stays silent."""

import pytest
from chromium import BROWSER, Page
from synthetic_run import HOSTILE, make_run

from valor.report.page import build_report
from valor.tracking.rundir import write_run_info

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return build_report(make_run(tmp_path_factory.mktemp("runs") / "ppo", steps=60))


def charts_without_curves(page: Page) -> list[str]:
    return page.run(
        "return [...document.querySelectorAll('.plot')]"
        ".filter(one => !one.querySelector('.scatterlayer .js-line, .barlayer .point, .heatmaplayer image'))"
        ".map(one => one.id)"
    )


def enter(page: Page, element: str, value: str | int, event: str) -> None:
    """Set a control as a user would, and let the page know."""
    page.run(
        "const [id, value, event] = arguments, e = document.getElementById(id);"
        "e.value = value; e.dispatchEvent(new Event(event))",
        element,
        value,
        event,
    )


@pytest.mark.parametrize(
    ("width", "phone", "dark"), [(1280, False, False), (390, True, True)], ids=["desktop, light", "phone, dark"]
)
def test_report_opens(report, browse, width, phone, dark):
    with browse(width=width, height=844, phone=phone, dark=dark) as page:
        page.open(report)
        page.wait_for("document.documentElement.dataset.ready === 'yes'")
        assert charts_without_curves(page) == []
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.run("return performance.getEntriesByType('resource').length") == 0

        assert page.run("return document.querySelectorAll('.sample').length") == 4
        shade = "getComputedStyle(document.querySelector('.tokens span')).backgroundColor"
        advantage = page.run(f"return {shade}")
        page.run("document.querySelectorAll('#signals button')[1].click()")
        assert page.run(f"return {shade}") != advantage

        # the first step has wrong answers, and those carry text that would break a careless page
        enter(page, "sample-step", "0", "change")
        texts = page.run("return [...document.querySelectorAll('.tokens')].map(one => one.textContent)")
        assert any(HOSTILE.strip() in text for text in texts)
        assert page.run("return window.hacked === undefined")
        title = page.run("return document.querySelector('.tokens span').title")
        assert (
            title.startswith('token 1: "First"') and "advantage" in title and "value" in title and "log-prob" in title
        )

        # validation samples have no advantages: no colours
        page.run("document.querySelectorAll('#signals button')[0].click()")
        enter(
            page, "sample-step", page.run("return document.getElementById('sample-step').options.length - 1"), "change"
        )
        assert page.run(f"return {shade}") in ("rgba(0, 0, 0, 0)", "color(srgb 0 0 0 / 0)")

        assert page.console() == []


# Of each card: what is drawn beyond its inner edges, as it is laid out; and what can be seen there.
OUTSIDE = """
return [...document.querySelectorAll('.panel')].flatMap((card) => {
  const box = card.getBoundingClientRect();
  const drawn = [...card.querySelectorAll('.plot, .legend, .scroll, .main-svg text, .main-svg path')];
  const wide = drawn.map((one) => [one.getBoundingClientRect(), one.textContent]).filter(([one]) => one.width);
  return wide.filter(([one]) => one.left < box.left + 0.5 || one.right > box.right - 0.5)
    .map(([, text]) => [card.id, text]);
});
"""
SEEN_OUTSIDE = """
return [...document.querySelectorAll('.panel .plot')].flatMap((plot) => {
  plot.scrollIntoView({ block: 'center', behavior: 'instant' });
  const box = plot.getBoundingClientRect();
  const seen = document.elementFromPoint(box.right + 3, box.top + box.height / 2);
  return seen?.closest('.js-plotly-plot') ? [plot.id] : [];
});
"""


@pytest.mark.parametrize("width", [320, 420])
def test_charts_stay_in_their_cards(report, browse, width):
    """Also in the moment after the screen has become narrower, before Plotly draws anew."""
    with browse(width=width, height=844, phone=True) as page:
        page.open(report)
        page.wait_for("document.documentElement.dataset.ready === 'yes'")
        assert page.run(OUTSIDE) == []
        narrower = {"width": width - 12, "height": 844, "deviceScaleFactor": 2, "mobile": True}
        page.devtools("Emulation.setDeviceMetricsOverride", **narrower)
        assert page.run(SEEN_OUTSIDE) == []
        page.wait_for("[...document.querySelectorAll('.plot')].every(p => p._fullLayout.width <= p.clientWidth + 1)")
        assert page.run(OUTSIDE) == [] and page.run("return document.documentElement.scrollWidth") <= width - 12
        assert page.console() == []


def test_an_episode_is_a_conversation(report, browse):
    with browse() as page:
        page.open(report)
        page.wait_for("document.documentElement.dataset.ready === 'yes'")
        step = "[...document.getElementById('sample-step').options].find(one => one.text === 'step 31').value"
        enter(page, "sample-step", page.run(f"return {step}"), "change")
        texts = "return [...document.querySelectorAll('#sample-list {}')].map(one => one.textContent)"
        heads = page.run(texts.format(".bubble:not(.told) > small"))
        assert heads == ["policy, turn 1", "policy, turn 2 · reward -0.500", "policy, turn 3"]
        answered, failed = page.run(texts.format(".call"))
        assert answered.startswith("search(") and "410 ms" in answered and HOSTILE.strip() in answered
        assert failed.startswith("serch({})410 ms · error: unknown")
        (told,) = page.run(texts.format(".told"))
        assert told.startswith("tool, ") and "Oslo is the capital" in told
        assert page.run("return document.querySelectorAll('#sample-list .told .tokens span[style]').length") == 0
        assert "all that came before, rewritten" in page.run(texts.format(".conversation > details"))[0]
        assert page.run("return window.hacked === undefined")
        assert page.console() == []


def test_without_scripts_there_are_tables(report, browse):
    with browse(scripts=False, dark=True) as page:
        page.open(report)
        shown = [bool(page.shown(selector)) for selector in ("#panel-reward table", "#samples .tokens", ".plot")]
        assert shown == [True, True, False]


def test_a_constant_share_has_an_axis_of_shares(browse, tmp_path):
    lines = [f'{{"step": {step}, "val-core/x/reward/mean@1": 1.0, "actor/kl_loss": 0.0}}\n' for step in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    with browse() as page:
        page.open(build_report(tmp_path))
        page.wait_for("document.documentElement.dataset.ready === 'yes'")
        axis = "document.getElementById('plot-{}')._fullLayout.{}"
        assert page.run(f"return {axis.format('validation', 'yaxis.range')}") == pytest.approx([0, 1.1])
        assert page.run(f"return {axis.format('kl', 'yaxis.range')}") == [0, 1]
        assert page.run(f"return {axis.format('validation', 'xaxis.title.text')}") == "step"


def test_sparse_runs_open_without_errors(browse, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "metrics.jsonl").write_text('{"step": 1, "mine/odd": null, "training/rollout_probs_diff_mean": 0.0}\n')
    grpo, without = make_run(tmp_path / "grpo", steps=2, critic=False), tmp_path / "without"
    without.mkdir()
    (without / "metrics.jsonl").touch()
    write_run_info(without, stopped="nothing could be graded")
    with browse() as page:
        for run_dir in (bare, grpo, without):
            page.open(build_report(run_dir))
            page.wait_for("document.documentElement.dataset.ready === 'yes'")
            assert page.console() == []
