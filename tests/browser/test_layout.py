"""Nothing of the page is cut off, at 1280 and at 400 pixels: legends, names of rows, ticks, filter, table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from browser.tab import Tab
from manyhands.report.page import draw
from report.samples import ten

pytestmark = pytest.mark.slow
WIDTHS = (1280, 400)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw(ten(tmp_path_factory.mktemp("ten")), pictures=False)


@pytest.fixture(scope="module", params=WIDTHS)
def tab(request: pytest.FixtureRequest, browser: object, page: Path) -> Tab:
    return Tab(browser, page).open(request.param)


def test_no_text_leaves_its_chart(tab: Tab) -> None:
    """Measured, not guessed: the box of every text lies within the box of its drawing."""
    outside = tab.run(
        "return [...document.querySelectorAll('.chart svg.marks')].flatMap(svg => {"
        "const all = svg.getBoundingClientRect();"
        "return [...svg.querySelectorAll('text')].filter(each => each.textContent.trim()"
        " && getComputedStyle(each).opacity !== '0').filter(each => {"
        "const box = each.getBoundingClientRect();"
        "return box.left < all.left - 2 || box.right > all.right + 2 || box.top < all.top - 2"
        " || box.bottom > all.bottom + 2}).map(each => each.textContent)})"
    )
    assert outside == []


def test_labels_of_an_axis_do_not_touch(tab: Tab) -> None:
    touching = tab.run(
        "return [...document.querySelectorAll('.chart svg.marks .role-axis-label')].flatMap(group => {"
        "const boxes = [...group.querySelectorAll('text')].filter(each => each.textContent.trim()"
        " && each.getAttribute('opacity') !== '0')"
        ".map(each => [each.textContent, each.getBoundingClientRect()]);"
        "return boxes.flatMap(([name, a], k) => boxes.slice(k + 1).filter(([, b]) =>"
        " a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1)"
        " .map(([other]) => name + ' and ' + other))})"
    )
    assert touching == []


def test_every_name_of_a_legend_is_whole(tab: Tab) -> None:
    keys = tab.run(
        "return [...document.querySelectorAll('#curves ul.key')].map(key =>"
        " [...key.querySelectorAll('li')].map(item => {"
        "const box = item.getBoundingClientRect(), all = item.closest('.panel').getBoundingClientRect();"
        "return [item.textContent, box.width > 0 && box.left >= all.left - 1 && box.right <= all.right + 1"
        " && item.scrollWidth <= item.clientWidth + 1]}))"
    )
    variants = {name for name, _ in keys[0]}
    assert len(variants) == 11
    assert {"hogwild", "layers", "pipeline micro_batches=4", "pipeline micro_batches=8"} <= variants
    assert all(whole for key in keys for _, whole in key)
    lines = {name for name, _ in keys[1]}
    assert lines == {"1 worker", "2 workers", "4 workers", "1 worker x 2 threads"}


def test_names_of_rows_are_whole_and_different(tab: Tab) -> None:
    """`pipeline micro_batches=…` twice: which is which?"""
    charts = tab.run(
        "return ['#breakdown', '.answer', '#how-sure'].map(place => [..."
        "document.querySelector(place + ' .chart svg.marks').querySelectorAll('.role-axis-label text')]"
        ".map(each => [...each.childNodes].map(part => part.textContent).join(' · ')))"
    )
    for names in charts:
        rows = [name for name in names if re.search("worker|thread", name)]
        assert len(rows) == len(set(rows)) >= 9
        assert not [name for name in rows if "…" in name]
        assert any("pipeline micro_batches=4" in name for name in rows)
        assert any("pipeline micro_batches=8" in name for name in rows)


def test_times_below_a_second_are_milliseconds(tab: Tab) -> None:
    """`500m` was read as 500 minutes."""
    ticks = tab.run(
        "return [...document.querySelectorAll('.answer .chart svg.marks, #curves .chart svg.marks')]"
        ".flatMap(svg => [...svg.querySelectorAll('.role-axis-label text')].map(each => each.textContent))"
    )
    assert [tick for tick in ticks if re.fullmatch(r"\d+ ms", tick)]
    assert [tick for tick in ticks if re.fullmatch(r"[\d.]+m", tick)] == []


def test_the_filter_shows_every_strategy(tab: Tab) -> None:
    cut = tab.run(
        "return [...document.querySelectorAll('.filter label')].filter(label => {"
        "const box = label.getBoundingClientRect(); return box.left < 0 || box.right > innerWidth})"
        ".map(label => label.textContent)"
    )
    assert cut == []
    assert tab.run("return document.querySelectorAll('.filter label').length") == 11


def test_nothing_scrolls_sideways_but_the_table_of_a_narrow_screen(tab: Tab) -> None:
    assert tab.run("return document.documentElement.scrollWidth <= innerWidth")
    inner, whole = tab.run(
        "const box = document.querySelector('#runs .scroll'); return [box.clientWidth, box.scrollWidth]"
    )
    assert (whole <= inner) == (tab.run("return innerWidth") > 1000)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_eleven_variants_have_eleven_colors(browser: object, page: Path, theme: str) -> None:
    tab = Tab(browser, page).open(1280, theme)
    colors = tab.run(
        "return [...document.querySelectorAll('.filter .swatch')].map(each =>"
        " getComputedStyle(each).backgroundColor)"
    )
    assert len(colors) == len(set(colors)) == 11
    drawn = tab.run(
        "return [...document.querySelector('#curves ul.key').querySelectorAll('path')].map(each =>"
        " getComputedStyle(each).stroke)"
    )
    assert drawn == colors, "the legend has the colors of the filter"
