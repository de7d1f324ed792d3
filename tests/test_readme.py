"""The front door: the README's program and commands run, links lead somewhere, and no setting is left out."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from pathlib import Path

import click
import pytest

import moepool
from moepool._native import build
from moepool.cli import main
from tests.programs import run

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

pytestmark = pytest.mark.skipif(not README.exists(), reason="not in a checkout")


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What a link to a heading of the page is called, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def named(page: Path) -> set[str]:
    """Everything in code style, but for blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)))


def test_it_opens_with_the_two_commands() -> None:
    first = re.search(r"```\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert first is not None
    assert [line.partition("#")[0].strip() for line in first[1].splitlines()] == ["make demo", "make test"]
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert {"demo", "test"} <= set(targets)


def test_the_program_runs(tmp_path: Path) -> None:
    program, by_route = blocks(README, "python")
    assert len(program.splitlines()) <= 20
    file = tmp_path / "program.py"
    file.write_text(program + by_route)
    assert re.fullmatch(
        r"\(1, 4, 256\) \d\d% of the experts wanted were in slots\n", run(sys.executable, file)
    )


def test_the_commands_run(tmp_path: Path) -> None:
    (commands,) = blocks(README, "console")
    (tmp_path / "README.md").write_text(README.read_text())
    used = set()
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        assert program == "moepool"
        used.add(arguments[0])
        run(sys.executable, "-m", "moepool", *arguments, cwd=tmp_path)
    commands = {"doctor", "info", "generate", "perplexity", "trace", "simulate", "plan", "demo"}
    assert used == commands <= named(README)


def test_experts_that_stay_come_from_a_trace_or_a_profile(tmp_path: Path) -> None:
    page = ROOT / "docs" / "policies.md"
    (command,), (program,) = blocks(page, "console"), blocks(page, "python")
    run(sys.executable, "-m", *shlex.split(command), cwd=tmp_path)
    look = "print(by_trace == by_profile != sorted(by_trace), set(pool.residents()[1]) == set(by_trace))"
    assert run(sys.executable, "-c", f"{program}\n{look}", cwd=tmp_path) == "True True\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http:", "https:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        assert target.is_relative_to(ROOT), f"{page.name} links to {link}, outside of the project"
        if anchor:
            assert anchor in anchors(target), (
                f"{page.name} links to {link}, {target.name} has no such heading"
            )


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", README.read_text())}
    assert set(PAGES) - {README} <= linked


def test_types_are_those_of_this_build() -> None:
    rows = re.findall(
        r"\| ([^|\n]+) \| ([\d.]+) \| (\d+) (?=\|)", README.read_text()
    )  # the table has two types a line
    told = {
        name: (float(bits), int(block))
        for names, bits, block in rows
        for name in re.findall(r"`(\w+)`", names)
    }
    assert told == {t.name: (8 * t.block_bytes / t.block, t.block) for t in moepool.quant_types().values()}


def test_every_setting_of_the_build_is_in_the_table() -> None:
    page, head = ROOT / "docs" / "install.md", build.__doc__ or ""
    told = set(re.findall(r"\b[A-Z]+_[A-Z_]+\b", head)) - set(dir(build))
    assert {"MOEPOOL_CUDA", "CUDA_PATH", "NVCC_APPEND_FLAGS"} <= told
    read = set(re.findall(r'env(?:\.get)?[\[(]"(\w+)"', Path(build.__file__).read_text()))
    assert {"MOEPOOL_CUDA", "CC"} <= read
    assert told | read | set(build.FLAG_VARIABLES) <= named(page)
    (archs,) = re.findall(r"`all` \|(.*)", page.read_text())
    assert tuple(re.findall(r"\d+", archs)) == build.TUNED_ARCHS


def test_every_variable_of_the_commands_is_in_the_table() -> None:
    page = named(ROOT / "docs" / "install.md")
    read = {
        option.envvar
        for command in main.commands.values()
        for option in command.params
        if isinstance(option, click.Option) and option.envvar
    }
    assert {"MOEPOOL_SLOTS", "MOEPOOL_VRAM"} <= read
    assert read <= page


def test_every_extra_is_in_the_table() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= named(ROOT / "docs" / "install.md")
