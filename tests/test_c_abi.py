"""The C ABI as a C99 program meets it: tests/c/abi.c, built by hand and through the CMake package."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import moepool
from tests.programs import run

SOURCE = Path(__file__).parent / "c" / "abi.c"
PACKAGE = Path(moepool.__file__).parent
VERSION = ".".join(moepool.__version__.split(".")[:2])


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_c99_program(tmp_path: Path) -> None:
    program = tmp_path / "abi"
    strict = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror"]
    link = [f"-L{PACKAGE / 'lib'}", "-lmoepool", f"-Wl,-rpath,{PACKAGE / 'lib'}"]
    run("gcc", *strict, f"-I{moepool.get_include()}", SOURCE, "-o", program, *link)
    assert run(program) == "ok\n"


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_cmake_package(tmp_path: Path) -> None:
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\n"
        "project(user C)\n"
        f"find_package(moepool {VERSION} CONFIG REQUIRED)\n"
        f"add_executable(abi {SOURCE})\n"
        "target_link_libraries(abi moepool::moepool)\n"
    )
    build = tmp_path / "build"
    run("cmake", "-S", tmp_path, "-B", build, f"-Dmoepool_DIR={PACKAGE / 'cmake'}")
    run("cmake", "--build", build)
    assert run(build / "abi") == "ok\n"


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_cmake_refuses_versions_that_do_not_fit(tmp_path: Path) -> None:
    whole = ".".join(moepool.__version__.split(".")[:3])
    fit = ["", VERSION, f"{whole} EXACT", f"{VERSION}...99"]
    misfit = ["99", f"{VERSION}.999", "0.0.1", "99...100"]
    lines = [
        f'find_package(moepool {v} CONFIG QUIET)\nmessage(STATUS "is ${{moepool_FOUND}}")'
        for v in fit + misfit
    ]
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.19)\nproject(user NONE)\n"
        f"set(where {PACKAGE / 'cmake'})\n"
        + "".join(
            f'unset(moepool_FOUND)\nset(moepool_DIR ${{where}} CACHE PATH "" FORCE)\n{line}\n'
            for line in lines
        )
    )
    printed = run("cmake", "-S", tmp_path, "-B", tmp_path / "build")
    found = [line.endswith("is 1") for line in printed.splitlines() if " is " in line]
    assert found == [True] * len(fit) + [False] * len(misfit), printed
