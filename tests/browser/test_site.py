"""The documentation site: every link leads somewhere, every public name is on it, and it works offline."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import manyhands
from conftest import ROOT, called

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, strictly: a broken link or anchor in any page, README and CONTRIBUTING too, is an error."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", folder]
    answer = called(command, ROOT, NO_MKDOCS_2_WARNING="1")
    assert answer.code == 0, answer.err
    return folder


def test_a_broken_link_or_anchor_fails_the_build(tmp_path: Path) -> None:
    """The configuration is strict: shown on a small repository with the same settings and two bad links."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed")
    (tmp_path / "docs").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/site_pages.py").write_text((ROOT / "tools/site_pages.py").read_text())
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    config = re.sub(r"  - mkdocstrings:\n(?:   .*\n)+", "", config)
    (tmp_path / "mkdocs.yml").write_text(config)
    (tmp_path / "docs/guide.md").write_text("# Guide\n\n## Train\n")
    (tmp_path / "README.md").write_text("# x\n\n[a](docs/gone.md) [b](docs/guide.md#gone)\n")
    answer = called([sys.executable, "-m", "mkdocs", "build"], tmp_path, NO_MKDOCS_2_WARNING="1")
    assert answer.code == 1
    assert "docs/gone.md" in answer.err
    assert "#gone" in answer.err
    (tmp_path / "README.md").write_text("# x\n\n[a](docs/guide.md) [b](docs/guide.md#train)\n")
    answer = called([sys.executable, "-m", "mkdocs", "build"], tmp_path, NO_MKDOCS_2_WARNING="1")
    assert answer.code == 0, answer.err


def test_every_public_name_is_on_the_api_page(site: Path) -> None:
    named = set(re.findall(r'id="manyhands\.(\w+)"', (site / "docs/api.html").read_text()))
    assert named == set(manyhands.__all__)


def test_fields_stand_with_their_comments(site: Path) -> None:
    text = re.sub(r"<[^>]+>|\s+", " ", (site / "docs/api.html").read_text())
    assert re.search(r"evaluate_every\W+float\W+epochs; 0: never[^;]*; default\W+1\.0", text)


def test_it_makes_no_request_and_no_complaint(site: Path, browser: Any) -> None:
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        if page.name == "404.html":  # for web servers: its links are absolute
            continue
        for kind in ("browser", "performance"):
            browser.get_log(kind)  # what the page before left
        browser.get(page.as_uri())
        assert requests(browser) <= {"file", "data"}, page
        assert browser.get_log("browser") == [], page


def test_search_finds_a_word_on_a_file(site: Path, browser: Any) -> None:
    browser.get_log("performance")
    browser.get((site / "index.html").as_uri())
    field = browser.find_element("css selector", ".md-search__input")
    browser.execute_script("document.querySelector('#__search').click()")
    field.send_keys("staleness")
    end = time.monotonic() + 30
    while not (found := browser.find_elements("css selector", ".md-search-result__link")):
        assert time.monotonic() < end, "the search found nothing"
        time.sleep(0.1)
    targets = [link.get_attribute("href") for link in found]
    assert any("docs/strategies/server.html" in target for target in targets), targets
    assert requests(browser) <= {"file", "data"}
    assert browser.get_log("browser") == []


def requests(browser: Any) -> set[str]:
    """The schemes of the addresses that the browser has asked for, without its own pages (a new tab)."""
    messages = (json.loads(entry["message"])["message"] for entry in browser.get_log("performance"))
    schemes = {
        message["params"]["request"]["url"].partition(":")[0]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    }
    return schemes - {"chrome"}
