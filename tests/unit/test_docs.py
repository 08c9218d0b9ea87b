"""The generated pages are the ones that the code describes now, and the pages' links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_snapshot.agent.pipelines.phases import PIPELINES

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def test_generated_pages_are_up_to_date() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_of_the_project(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_the_agents_page_names_every_phase_in_its_order() -> None:
    page = (ROOT / "docs" / "node-agent.md").read_text(encoding="utf-8")
    for pipeline, phases in PIPELINES.items():
        assert f"| {pipeline} | {', '.join(phase.name for phase in phases)} |" in page


def test_the_readme_names_every_folder_and_links_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    layout = readme.partition("## Where things are")[2].partition("## Read on")[0]
    packages = [path.parent for path in (ROOT / "dynamo_snapshot").glob("*/__init__.py")]
    folders = [*packages, *(ROOT / name for name in ("deploy", "docs", "examples", "planner", "tests", "worker_hooks"))]
    assert [folder.name for folder in folders if f"{folder.name}/ " not in layout] == []
    assert [page.name for page in PAGES[1:] if f"({page.relative_to(ROOT)})" not in readme] == []
