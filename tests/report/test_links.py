"""Links of the page lead to files, whatever runs are called: none is a script or another host's (D7)."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from manyhands.core.errors import UsageError
from manyhands.records.run_folder import RunFolder
from manyhands.records.study_results import Results, StudyFolder
from manyhands.report import page as pages
from manyhands.report.page import draw
from manyhands.testing.records import record

NASTY = (
    "javascript:f()",
    "JavaScript:alert(1)",
    "java\nscript:f()",
    "\tjavascript:f()",
    "data:text,x",
    "vbscript:x",
    "http:evil",
    "..\\..\\x",
    "\\\\host\\share",
    'a" onclick="f()',
    "a' onclick='f()",
    "<img src=x onerror=f()>",
    "a#b?c=d&e",
    "%2e%2e%2fx",
    "a b·é",
    "-rf",
)


FIXED = ("results.csv", "data:,")  # the table, and an icon that is none


class Links(HTMLParser):
    """Everything in a page that names an address, and every attribute that is a script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src", "action", "formaction"):
                self.found.append(value or "")
            if name.startswith("on"):
                self.scripts.append(f"{tag} {name}")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_vega", lambda: "")  # megabytes that are no part of this


def test_links_to_runs_are_paths(here: Path) -> None:
    for name in NASTY:
        made = record(rate=1000.0)
        folder = RunFolder(Path("study") / name)
        folder.create()
        folder.write_spec(made.spec)
        folder.write_record(made.model_copy(update={"run": f"javascript:{name}"}))  # a file may say anything
    page = draw(StudyFolder(Path("study")).read(), pictures=False)
    links = Links(page.read_text())
    assert not links.scripts
    own = [link for link in links.found if not link.startswith("#") and link not in FIXED]
    assert len(own) == len(NASTY)
    for link in own:
        assert link.startswith("./")
        assert (urlsplit(link).scheme, urlsplit(link).netloc) == ("", ""), link
        assert Path("study", unquote(link)).is_file(), link


@pytest.mark.parametrize("run", ["//host/x", "/x", "../x", "javascript:f()", "data:,x"])
def test_a_link_from_anywhere_to_anywhere_is_a_path(run: str, here: Path) -> None:
    page = draw(Results(Path("s"), "s", "s", records=[record(run=run)]), pictures=False)
    (link,) = [link for link in Links(page.read_text()).found if link.endswith("result.json")]
    assert link.startswith("./")
    assert (urlsplit(link).scheme, urlsplit(link).netloc) == ("", "")
    assert (Path("s") / unquote(link)).resolve() == (Path(run) / "result.json").resolve()


def test_pictures_are_drawn_into_the_reports_own_folder(here: Path) -> None:
    """What an earlier drawing left there is removed, which elsewhere would be somebody's file."""
    Path("s").mkdir()
    Path("elsewhere").mkdir()
    Path("elsewhere/answer.png").write_text("somebody's")
    Path("s/charts").symlink_to("../elsewhere")
    results = Results(Path("s"), "s", "s", records=[record()])
    with pytest.raises(UsageError, match=r"^s/charts is a link: remove it, or choose another --out$"):
        draw(results)
    assert [path.name for path in Path("elsewhere").iterdir()] == ["answer.png"]
