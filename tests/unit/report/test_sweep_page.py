"""The page of a sweep: every arm in it, nothing loaded from elsewhere, silent in a real browser on two screens."""

import pytest
from chromium import BROWSER

from valor.report.lab_pages import comparison, sweep_page

HOSTILE = "</script><img src=x onerror=hacked=1>"


def estimate(mean: float, low: float | None, high: float | None) -> dict:
    return {"mean": mean, "low": low, "high": high}


def results(arms: int = 14) -> dict:
    """Arms of three seeds; the last has one that failed, whose error would break a careless page."""
    names = [f"arm_{i}" for i in range(arms)]
    made = []
    for i, name in enumerate(names):
        ends = [0.5 + 0.02 * i, 0.52 + 0.02 * i, 0.57 + 0.02 * i]
        gap = estimate(0.02 * i, 0.02 * i - 0.01, 0.02 * i + 0.01)
        gap |= {"by_seed": [0.02 * i] * 3, "p_t": 0.01, "p_signs": 0.25, "p_holm": 0.01 * i, "significant": i < 5}
        finished = {str(seed): {"first": 0.3, "last": end, "seconds": 90.0} for seed, end in enumerate(ends)}
        made.append(
            {
                "name": name,
                "settings": {
                    "algorithm.lam": f"{1 - 0.01 * i}",
                    "critic.model.path": "'OUT/stage1/huggingface/critic'",
                },
                "first": estimate(0.3, 0.3, 0.3),
                "last": estimate(0.53 + 0.02 * i, ends[0], ends[2]),
                "finished": finished,
                "errors": {},
                "difference": gap if i else None,
            }
        )
    made[-1]["finished"].pop("2")
    made[-1]["errors"] = {"2": HOSTILE}
    curve = {"steps": [0, 10, 20], "mean": [0.3, 0.4, 0.5], "low": [0.3, 0.38, None], "high": [0.3, 0.41, None]}
    bounded = {"steps": [0, 10, 20], "mean": [0.3, 0.5, 0.6], "low": [0.3, 0.48, 0.5], "high": [0.3, 0.51, 0.7]}
    of_arms = {name: bounded if i % 2 else curve for i, name in enumerate(names)}
    return {
        "name": "lambdas",
        "entry": "ppo",
        "metric": "validation score",
        "control": "arm_0",
        "seeds": [0, 1, 2],
        "level": 0.95,
        "differing": ["algorithm.lam", "critic.model.path"],
        "arms": made,
        "curves": [
            {"key": "validation score", "title": "Validation score", "arms": of_arms},
            {"key": "critic/score/mean", "title": "Reward", "arms": of_arms | {"arm_3": None}},
        ],
        "notes": ["A note."],
    }


def test_the_page_is_complete_and_closed():
    page = sweep_page(results())
    assert page.count("</script>") == 3 and "<img" not in page
    assert "default-src 'none'" in page and 'src="http' not in page
    assert "critic.model.path" in page and "stage1/huggingface/critic" in page
    assert len(page) < 3_000_000
    heads, rows = comparison(results())
    assert len(rows) == 14 and all(len(row) == len(heads) for row in rows)
    assert sweep_page(results()) == page


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium: apt-get install chromium")
@pytest.mark.parametrize(
    ("width", "phone", "dark"), [(1280, False, False), (390, True, True)], ids=["desktop, light", "phone, dark"]
)
def test_the_page_opens(browse, tmp_path, width, phone, dark):
    path = tmp_path / "sweep.html"
    path.write_text(sweep_page(results()), encoding="utf-8")
    with browse(width=width, height=844, phone=phone, dark=dark) as page:
        page.open(path)
        page.wait_for("document.documentElement.dataset.ready === 'yes'")
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.run("return performance.getEntriesByType('resource').length") == 0
        lines = "document.querySelectorAll('#plot-curve-0 .scatterlayer .trace').length"
        assert page.run(f"return {lines}") == 8 + 4  # eight arms, every second with a band; others by the legend
        fills = "return [...document.querySelectorAll('#plot-curve-0 .js-fill')].map(one => getComputedStyle(one).fill)"
        assert len(set(page.run(fills))) == 4
        assert page.run("return window.hacked === undefined")
        clipped = "(one => one.scrollWidth > one.clientWidth)(document.querySelector('#compared .scroll'))"
        assert page.run(f"return {clipped}") == (width < 1280)  # a desk shows every column
        assert page.console() == []
