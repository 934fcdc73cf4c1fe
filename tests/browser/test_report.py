"""The page in a real browser: drawn, quiet, filtered, light and dark, wide and narrow, without a request."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser.tab import Tab
from manyhands.report.charts import CHARTS
from manyhands.report.page import draw
from report.samples import rich

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
pytestmark = pytest.mark.slow
SEVEN = ("single", "allreduce", "average", "server", "hogwild", "layers", "pipeline micro_batches=4")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study = replace(rich(tmp_path_factory.mktemp("study")), claim="averaging")
    return draw(study, pictures=False)


@pytest.fixture(scope="module")
def tab(browser: Any, page: Path) -> Tab:
    return Tab(browser, page)


def test_every_chart_is_drawn_and_nobody_complains(tab: Tab) -> None:
    tab.open()
    sizes = tab.run(
        "return [...document.querySelectorAll('.chart')].map(chart => {"
        "const box = chart.querySelector('svg.marks')?.getBoundingClientRect();"
        "return [chart.closest('figure').dataset.chart, box ? box.width : 0, box ? box.height : 0,"
        " chart.querySelectorAll('svg .role-mark path, svg .role-mark line, svg .role-mark text').length]})"
    )
    assert {name for name, *_ in sizes} == {chart.name for chart in CHARTS} - {"how-sure"}
    assert [each for each in sizes if each[1] < 300 or each[2] < 90 or each[3] < 1] == []
    assert tab.run("return window.manyhands.count.failed") == 0
    assert tab.browser.get_log("browser") == []


def test_no_request_leaves_the_file(tab: Tab) -> None:
    tab.open()
    wanted = [
        message["params"]["request"]["url"]
        for entry in tab.browser.get_log("performance")
        if (message := json.loads(entry["message"])["message"])["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in wanted if not url.startswith("data:")] == [tab.page.as_uri()]
    assert tab.run("return performance.getEntriesByType('resource').map(each => each.name)") == []


def test_a_chart_far_below_waits_until_the_reader_is_near_or_the_page_idle(tab: Tab) -> None:
    tab.browser.get(tab.page.as_uri())
    tab.until("return document.querySelector('.answer .chart svg') !== null")
    assert tab.run("return document.documentElement.dataset.ready !== 'yes'")
    tab.drawn()


def test_marks_tell_their_numbers(tab: Tab) -> None:
    tab.open()
    tab.run("document.querySelector('#speed-up').scrollIntoView({behavior: 'instant'})")
    mark = tab.browser.find_elements("css selector", "#speed-up .chart svg .mark-symbol.role-mark path")[1]
    selenium.ActionChains(tab.browser).move_to_element(mark).perform()
    tip = tab.until("return document.querySelector('#vg-tooltip-element.visible')?.innerText")
    assert "speed-up" in tip
    assert "efficiency" in tip
    assert "mnist-mlp-" in tip, "every number has its run behind it"


def test_the_filter_is_for_all_charts_and_the_table(tab: Tab) -> None:
    tab.open()
    boxes = tab.run("return [...document.querySelectorAll('.filter input')].map(box => box.value)")
    assert tuple(boxes) == SEVEN
    seen = (
        "return [...document.querySelectorAll(arguments[0] + ' .chart svg')]"
        ".map(svg => svg.textContent).join(' ')"
    )
    rows = "return [...document.querySelectorAll('#runs tbody tr')].filter(row => row.offsetHeight).length"
    before, all_rows = tab.run(seen, "main"), tab.run(rows)
    assert "hogwild" in before
    tab.tick("hogwild")
    after = tab.run(seen, "main")
    assert "hogwild" not in after
    assert "allreduce" in after
    assert 0 < tab.run(rows) < all_rows
    for name in ("server", "allreduce"):  # nothing is left of the staleness but words
        tab.tick(name)
    assert "switched off" in tab.run("return document.querySelector('#staleness .chart').textContent")
    for name in ("hogwild", "server", "allreduce"):
        tab.tick(name)
    assert tab.run(seen, "#staleness").count("hogwild") >= 2
    assert tab.run(rows) == all_rows
    assert tab.browser.get_log("browser") == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_follows_the_system_and_the_button(tab: Tab, theme: str) -> None:
    tab.open(theme=theme)
    paper = "return getComputedStyle(document.body).backgroundColor"
    label = "return getComputedStyle(document.querySelector('.answer .chart .role-axis-label text')).fill"
    other = {"light": "dark", "dark": "light"}[theme]
    first = tab.run("return document.documentElement.dataset.theme"), tab.run(paper), tab.run(label)
    tab.browser.find_element("id", "theme").click()
    second = tab.run("return document.documentElement.dataset.theme"), tab.run(paper), tab.run(label)
    assert (first[0], second[0]) == (theme, other)
    assert _light(first[1]) is (theme == "light")
    assert _light(second[1]) is (theme == "dark")
    assert first[2] != second[2], "the charts follow"
    contrast = [abs(_gray(paper) - _gray(ink)) for _, paper, ink in (first, second)]
    assert min(contrast) > 100, "their words can be read"
    tab.run("localStorage.clear()")


def _gray(color: str) -> float:
    numbers = [float(part) for part in color.partition("(")[2].rstrip(")").split(",")[:3]]
    return sum(numbers) / 3


def _light(color: str) -> bool:
    return _gray(color) > 128


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_width_scrolls_sideways(tab: Tab, width: int) -> None:
    tab.open(width)
    assert tab.run("return document.documentElement.scrollWidth") <= width
    wide = (
        "return [...document.querySelectorAll('.chart svg')]"
        ".filter(svg => svg.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert tab.run(wide) == 0


def test_whoever_cannot_see_is_told(tab: Tab) -> None:
    tab.open()
    labels = tab.run("return [...document.querySelectorAll('.chart')].map(each => each.ariaLabel)")
    assert len(labels) == tab.run("return document.querySelectorAll('.chart[role=img]').length") > 20
    assert all(len(label) > 40 for label in labels)
    assert tab.run("return [...document.querySelectorAll('button')].every(b => b.innerText || b.ariaLabel)")
    tab.run("document.querySelector('#memory details').open = true")
    tab.until("return document.querySelectorAll('#memory details table tbody tr').length > 5")
    assert "megabytes" in tab.run("return document.querySelector('#memory details thead').innerText")
    levels = tab.run("return [...document.querySelectorAll('h1, h2, h3')].map(each => +each.tagName[1])")
    assert levels[0] == levels.count(1) == 1


def test_the_table_sorts_numbers_as_numbers(tab: Tab) -> None:
    tab.open()
    column = (
        "const heads = [...document.querySelectorAll('#runs th')];"
        "const at = heads.findIndex(head => head.innerText.startsWith('samples/s'));"
        "if (arguments[0]) heads[at].querySelector('button').click();"
        "return [...document.querySelectorAll('#runs tbody tr')]"
        ".map(row => row.cells[at].innerText.replace(',', '')).filter(text => text !== '–')"
    )
    up = [float(text) for text in tab.run(column, True)]
    assert len(up) > 100
    assert up == sorted(up)
    down = [float(text) for text in tab.run(column, True)]
    assert down == sorted(down, reverse=True)


def test_it_begins_with_the_claim_and_the_answer(tab: Tab) -> None:
    tab.open()
    text = tab.run("return document.querySelector('main').innerText")
    claim, answer, filter_ = text.index("Not settled"), text.index("For mnist-mlp"), text.index("show\n")
    assert claim < answer < filter_
    assert tab.run("return document.querySelector('.answer .chart').getBoundingClientRect().top") < 1100
    assert "manyhands study default" in text
    assert "SIGKILL" in text


def test_paper_is_white(tab: Tab) -> None:
    tab.open(theme="dark")
    tab.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert _light(tab.run("return getComputedStyle(document.body).backgroundColor"))
        assert tab.run("return getComputedStyle(document.querySelector('.filter')).display") == "none"
    finally:
        tab.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
