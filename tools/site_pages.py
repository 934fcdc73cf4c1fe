"""A hook of MkDocs: the site has the repository's own folders, so every relative link is right in both."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*", "benchmarks/**/*.md", "examples/*.py")


def paths(root: Path) -> list[Path]:
    """The files of the site, relative to the repository."""
    found = {path for pattern in PAGES for path in root.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(root) for path in found)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository; keep what the theme added."""
    root = Path(config.config_file_path).parent
    for file in list(files.documentation_pages()) + list(files.media_files()):
        if file.abs_src_path and Path(file.abs_src_path).is_relative_to(config.docs_dir):
            files.remove(file)
    for path in paths(root):
        files.append(File.generated(config, path.as_posix(), abs_src_path=str(root / path)))
    return files
