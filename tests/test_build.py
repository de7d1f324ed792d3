"""The build: what it decides, what it compiles again, and what the library that came out of it may hold."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import moepool
from moepool._native import build, lib
from tests.programs import run

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(moepool.__file__).parent
HEADER = (PACKAGE / "include" / "moepool.h").read_text()
LIBRARY = PACKAGE / "lib" / "libmoepool.so"

needs_binutils = pytest.mark.skipif(shutil.which("nm") is None, reason="no binutils")
needs_checkout = pytest.mark.skipif(not (ROOT / "setup.py").exists(), reason="not in a checkout")


# ----------------------------------------------------------------------------------------------- the binding


def test_cdef_keeps_declarations_only() -> None:
    text = build.cdef(
        "/* a\n * comment; */\n#ifndef X\n#define MOEPOOL_API __attribute__((x))\n#ifdef __cplusplus\n"
        'extern "C" {\n#endif\nMOEPOOL_API int f(void); /* f */\ntypedef struct s { int a; /* # */ } s;\n'
        "#ifdef __cplusplus\n}\n#endif\n#endif\n"
    )
    assert " ".join(text.split()) == "int f(void); typedef struct s { int a; } s;"


def test_binding_has_what_the_header_declares() -> None:
    declared = set(re.findall(r"^MOEPOOL_API\s[^;(]*?\b(moepool_\w+)\(", HEADER, flags=re.MULTILINE))
    assert len(declared) == HEADER.count("\nMOEPOOL_API ")
    assert {name for name in dir(lib) if name.startswith("moepool_")} == declared


def test_statuses_have_the_error_of_their_kind() -> None:
    from moepool import _native, errors

    expected = {
        "ARGUMENT": errors.ArgumentError,
        "INDEX": errors.IdError,
        "OUT_OF_MEMORY": errors.OutOfMemoryError,
        "CUDA": errors.CudaError,
        "IO": errors.FormatError,
        "UNSUPPORTED": errors.UnsupportedError,
        "STATE": errors.StateError,
        "INTERNAL": errors.MoePoolError,
        "INTERRUPTED": errors.MoePoolError,
    }
    assert {f"MOEPOOL_ERROR_{name}" for name in expected} == {n for n in dir(lib) if "_ERROR_" in n}
    for name, error in expected.items():
        with pytest.raises(errors.MoePoolError) as caught:
            _native.check(getattr(lib, f"MOEPOOL_ERROR_{name}"))
        assert type(caught.value) is error
    _native.check(lib.MOEPOOL_OK)


# ------------------------------------------------------------------------------------------- what it decides


def make_program(file: Path, script: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


@pytest.mark.parametrize("homes", [{}, {"CUDA_HOME": ""}, {"CUDA_HOME": "/dead", "CUDA_PATH": "/also/dead"}])
def test_without_nvcc_a_cpu_build_with_one_notice(
    homes: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"PATH": str(tmp_path), **homes}
    assert build.plan_cuda(env, default=str(tmp_path / "none")) is None
    assert capsys.readouterr().err.splitlines() == ["moepool: no nvcc found: building for the CPU only"]


def test_nvcc_is_looked_for_in_order(tmp_path: Path) -> None:
    places = {
        name: make_program(tmp_path / name / "bin" / "nvcc", "")
        for name in ("home", "cuda_path", "path", "usr")
    }
    env = {
        "CUDACXX": str(make_program(tmp_path / "my-nvcc", "")),
        "CUDA_HOME": str(tmp_path / "home"),
        "CUDA_PATH": str(tmp_path / "cuda_path"),
        "PATH": str(tmp_path / "path" / "bin"),
    }
    default = str(tmp_path / "usr")
    for name, expected in zip(list(env), [tmp_path / "my-nvcc", *places.values()], strict=False):
        assert build.find_nvcc(env, default) == str(expected)
        env[name] = ""
    assert build.find_nvcc(env, default) == str(places["usr"])
    with pytest.raises(build.BuildError, match="CUDACXX=missing"):
        build.find_nvcc({"CUDACXX": "missing", "PATH": ""}, default)


def test_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"PATH": str(tmp_path / "empty")}
    broken = {"CUDACXX": str(make_program(tmp_path / "nvcc", "echo no licence for nvcc >&2; exit 1"))}
    assert build.plan_cuda({"MOEPOOL_CUDA": "off", **broken}) is None
    assert capsys.readouterr().err == ""
    with pytest.raises(build.BuildError, match="no nvcc was found"):
        build.plan_cuda({"MOEPOOL_CUDA": "on", **nothing}, default=str(tmp_path))
    with pytest.raises(build.BuildError, match="'maybe'"):
        build.plan_cuda({"MOEPOOL_CUDA": "maybe"})
    for mode in ("", "auto", "on"):
        with pytest.raises(build.BuildError, match="no licence for nvcc"):
            build.plan_cuda({"MOEPOOL_CUDA": mode, **broken})
    assert build.plan_cuda({"MOEPOOL_CUDA": "fallback", **broken}) is None
    assert "no licence for nvcc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "gpus", "archs"),
    [
        ("native", [], ("90",)),
        ("native", ["80", "90"], ("80", "90")),
        ("native", ["90", "130"], ("90", "120")),
        ("all", [], ("80", "90", "100", "120")),
        ("90;80", [], ("80", "90")),
        (" 100, 80 ", [], ("80", "100")),
        ("90a", [], ("90a",)),
    ],
)
def test_architectures(wanted: str, gpus: list[str], archs: tuple[str, ...]) -> None:
    assert build.select_archs(wanted, ["80", "90", "100", "120"], lambda: gpus) == archs


@pytest.mark.parametrize("wanted", ["fast", "8.0", ";", "70", "80;70"])
def test_architectures_refused(wanted: str) -> None:
    with pytest.raises(build.BuildError, match="70" if "70" in wanted else "MOEPOOL_CUDA_ARCHS"):
        build.select_archs(wanted, ["80", "90"], list)


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("CFLAGS", "-O2 -ffast-math"),
        ("CXXFLAGS", "-Ofast"),
        ("LDFLAGS", "-ffast-math"),
        ("CPPFLAGS", "-funsafe-math-optimizations -g"),
        ("NVCC_APPEND_FLAGS", "--use_fast_math"),
        ("NVCC_APPEND_FLAGS", "-Xcompiler=-O2,-ffast-math"),
        ("NVCC_PREPEND_FLAGS", "-ftz=true"),
    ],
)
def test_flags_that_change_bits_are_refused(name: str, flags: str, tmp_path: Path) -> None:
    with pytest.raises(build.BuildError, match=name):
        build.Builder(tmp_path, "1.0", {name: flags}, None)


def test_users_flags_stand_before_the_required_ones(tmp_path: Path) -> None:
    env = {"CFLAGS": "-march=native", "CXXFLAGS": "-O1 -ffp-contract=fast -fno-fast-math -std=c++20"}
    command = build.Builder(tmp_path, "1.0", env, None).compile_step(tmp_path / "csrc" / "a.cpp").command
    for ours, users in (
        ("-ffp-contract=off", "-ffp-contract=fast"),
        ("-std=c++17", "-std=c++20"),
        ("-O1", "-O3"),
    ):
        assert command.index(ours) > command.index(users)


# ------------------------------------------------------------------------------------- what it compiles again

SMALL_HEADER = """\
#ifndef MOEPOOL_H
#define MOEPOOL_H
#define MOEPOOL_API __attribute__((visibility("default")))
#ifdef __cplusplus
extern "C" {
#endif
enum { MOEPOOL_ABI_VERSION = 1 };
MOEPOOL_API int moepool_abi_version(void);
MOEPOOL_API const char *moepool_build_info(void);
#ifdef __cplusplus
}
#endif
#endif
"""
SMALL_API = """\
#include "moepool.h"
#include <string>
#include <vector>
int visible_elsewhere(int);
std::vector<std::string> words() { return {"a", "b"}; }
int moepool_abi_version(void) { return visible_elsewhere(MOEPOOL_ABI_VERSION) + (int)words().size() - 2; }
const char *moepool_build_info(void) {
    return "{\\"cuda\\": \\"" MOEPOOL_BUILD_CUDA "\\", \\"flags\\": \\"" MOEPOOL_BUILD_FLAGS "\\"}";
}
"""


SMALL_SIMULATOR = """\
#include <Python.h>
int law();
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_sim"};
PyMODINIT_FUNC PyInit__sim(void) {
    PyObject *made = PyModule_Create(&module);
    PyModule_AddIntConstant(made, "law", law());
    return made;
}
"""


class SmallTree:
    """A source tree of a few files, built in place by the real setup.py in a process of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("setup.py", "pyproject.toml", "LICENSE", "moepool/_native/build.py"):
            self.write(name, (ROOT / name).read_text())
        self.write("README.md", "small\n")
        self.write("moepool/__init__.py", "")
        self.write("moepool/_native/__init__.py", "")
        self.write("include/moepool.h", SMALL_HEADER)
        self.write("csrc/api.cpp", SMALL_API)
        self.write("csrc/part/other.h", "#define NOTHING 0\n")
        self.write(
            "csrc/part/other.cpp",
            '#include "part/other.h"\nint visible_elsewhere(int x) { return x + NOTHING; }\n',
        )
        self.write("csrc/pool/residency.cpp", "int law() { return 42; }\n")
        self.write("csrc/sim/module.cpp", SMALL_SIMULATOR)

    def write(self, name: str, text: str) -> None:
        file = self.root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def try_build(self, **env: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in build.FLAG_VARIABLES}
        return subprocess.run(
            [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
            cwd=self.root,
            env={**kept, "LC_ALL": "C", "MOEPOOL_CUDA": "off", **env},
            capture_output=True,
            text=True,
            check=False,
        )

    def build(self, **env: str) -> list[str]:
        """Names of the files that were made, in alphabetical order."""
        done = self.try_build(**env)
        assert done.returncode == 0, done.stdout + done.stderr
        return sorted(done.stdout.split())

    def build_info(self) -> dict[str, str]:
        code = (
            "import json; from moepool._native._lib import ffi, lib; assert lib.moepool_abi_version() == 1;"
            "print(ffi.string(lib.moepool_build_info()).decode())"
        )
        info: dict[str, str] = json.loads(run(sys.executable, "-c", code, cwd=self.root))
        return info


@pytest.fixture
def tree(tmp_path: Path) -> SmallTree:
    return SmallTree(tmp_path / "a tree")  # a path with a space: every command must survive it


@needs_checkout
def test_only_what_changed_is_compiled(tree: SmallTree) -> None:
    links, simulator = ["_lib.abi3.so", "libmoepool.so"], build.SIMULATOR
    sources = ["csrc/api.cpp", "csrc/part/other.cpp", "csrc/pool/residency.cpp", "csrc/sim/module.cpp"]
    assert tree.build() == sorted([*links, simulator, "_lib.c", *sources])
    assert tree.build() == []
    (tree.root / "csrc/api.cpp").touch()
    assert tree.build() == []
    tree.write("csrc/part/other.h", "#define NOTHING (1 - 1)\n")
    assert tree.build() == ["csrc/part/other.cpp"]  # the same object: nothing to link
    tree.write("csrc/part/other.h", "#define NOTHING 7\n")
    assert tree.build() == sorted([*links, "csrc/part/other.cpp"])
    tree.write("csrc/part/other.h", "#define NOTHING 0\n")
    assert tree.build() == sorted([*links, "csrc/part/other.cpp"])
    assert "-g1" not in tree.build_info()["flags"]
    tree.write("csrc/sim/module.cpp", SMALL_SIMULATOR.replace("law())", "-law())"))
    assert tree.build() == sorted([simulator, "csrc/sim/module.cpp"])  # the library has no part in it
    tree.write("csrc/pool/residency.cpp", "int law() { return 43; }\n")
    assert tree.build() == sorted([*links, simulator, "csrc/pool/residency.cpp"])
    assert "csrc/part/other.cpp" in tree.build(CXXFLAGS="-g1")
    assert "-g1" in tree.build_info()["flags"]
    (tree.root / "csrc/part/other.h").unlink()
    assert tree.try_build(CXXFLAGS="-g1").returncode != 0


@needs_checkout
@needs_binutils
def test_the_simulator_is_a_module_of_this_python_with_the_librarys_law(tree: SmallTree) -> None:
    tree.build()
    code = "from moepool import _sim; print(_sim.law, _sim.__file__)"
    law, _, file = run(sys.executable, "-c", code, cwd=tree.root).strip().partition(" ")
    assert law == "42"
    assert Path(file).name == build.SIMULATOR
    names = {name for _, name in symbols(tree.root / "moepool/lib/libmoepool.so")}
    assert not any("PyInit" in name for name in names)


@needs_checkout
def test_a_wheel_is_of_one_python(tree: SmallTree) -> None:
    """The simulator has no stable ABI, so a wheel must not say that it serves others."""
    tree.build()
    run(
        *(sys.executable, "setup.py", "-q", "bdist_wheel"),
        cwd=tree.root,
        env={**os.environ, "MOEPOOL_CUDA": "off"},
    )
    (wheel,) = (tree.root / "dist").glob("*.whl")
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert f"-{here}-{here}-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        assert {f"moepool/{product}" for product in build.PRODUCTS} <= set(archive.namelist())


@needs_checkout
def test_an_error_in_the_sources_fails_the_build(tree: SmallTree) -> None:
    tree.build()
    tree.write("csrc/part/other.cpp", "int visible_elsewhere(int x) { return y; }\n")
    for _ in range(2):
        done = tree.try_build()
        assert done.returncode != 0
        assert "csrc/part/other.cpp" in done.stderr
        assert "'y' was not declared" in done.stderr


@needs_checkout
def test_a_function_that_only_the_header_has_fails_the_import(tree: SmallTree) -> None:
    tree.write(
        "include/moepool.h", SMALL_HEADER.replace("enum", "MOEPOOL_API int moepool_missing(void);\nenum")
    )
    tree.build()
    with pytest.raises(AssertionError, match="undefined symbol: moepool_missing"):
        tree.build_info()


@needs_checkout
@needs_binutils
def test_small_library_exports_only_its_api(tree: SmallTree) -> None:
    tree.build()
    assert set(exports(tree.root / "moepool/lib/libmoepool.so")) == {
        "moepool_abi_version",
        "moepool_build_info",
    }
    assert (tree.root / "moepool/include/moepool.h").read_text() == SMALL_HEADER
    version = (tree.root / "moepool/cmake/moepoolConfigVersion.cmake").read_text()
    project = tomllib.loads((tree.root / "pyproject.toml").read_text())["project"]
    assert f'set(PACKAGE_VERSION "{project["version"]}")' in version


@needs_checkout
def test_a_failing_nvcc_fails_the_build_and_shows_why(tree: SmallTree) -> None:
    tree.write("csrc/kernel.cu", "")
    nvcc = str(make_program(tree.root / "nvcc", "echo cospi clashes with glibc >&2; exit 1"))
    for mode in ("auto", "on"):
        done = tree.try_build(CUDACXX=nvcc, MOEPOOL_CUDA=mode)
        assert done.returncode != 0
        assert "cospi clashes with glibc" in done.stderr
    done = tree.try_build(CUDACXX=nvcc, MOEPOOL_CUDA="fallback")
    assert done.returncode == 0
    assert "cospi clashes with glibc" in done.stderr
    assert "building for the CPU only" in done.stderr
    assert tree.build_info()["cuda"] == ""


def make_nvcc(tree: SmallTree, release: str, compiles: str) -> str:
    """A program that answers as nvcc does, and runs a command of the shell where it is to compile."""
    answers = (
        'case "$*" in\n'
        f"*--version*) echo 'nvcc: release {release}, V{release}.1';;\n"
        "*--list-gpu-arch*) echo compute_80; echo compute_90;;\n"
        "*--dryrun*) echo '#$ LIBRARIES=  \"-L/nowhere\"';;\n"
        f"*) {compiles};;\n"
        "esac"
    )
    return str(make_program(tree.root / "nvcc", answers))


@needs_checkout
def test_an_nvcc_that_is_too_old_says_what_to_do(tree: SmallTree) -> None:
    tree.write("csrc/kernel.cu", "")
    nvcc = make_nvcc(tree, "11.8", "exit 2")
    done = tree.try_build(CUDACXX=nvcc, MOEPOOL_CUDA="auto", MOEPOOL_CUDA_ARCHS="80")
    assert done.returncode != 0
    assert "is of CUDA 11.8, moepool needs 12.3 or newer" in done.stderr
    assert "MOEPOOL_CUDA=off" in done.stderr


@needs_checkout
def test_an_nvcc_that_fails_on_a_kernel_is_no_different(tree: SmallTree) -> None:
    tree.write("csrc/kernel.cu", "")
    nvcc = make_nvcc(tree, "12.4", "echo kernel.cu: too many registers >&2; exit 2")
    done = tree.try_build(CUDACXX=nvcc, MOEPOOL_CUDA="auto", MOEPOOL_CUDA_ARCHS="80;90")
    assert done.returncode != 0
    assert "too many registers" in done.stderr
    assert "compute_80,code=sm_80" in done.stderr
    done = tree.try_build(CUDACXX=nvcc, MOEPOOL_CUDA="fallback", MOEPOOL_CUDA_ARCHS="80;90")
    assert done.returncode == 0
    assert "too many registers" in done.stderr
    assert tree.build_info()["cuda"] == ""


# ---------------------------------------------------------------------------------------- what came out of it


def symbols(file: Path, *options: str) -> list[tuple[str, str]]:
    """(type letter, name) of every symbol that nm lists."""
    lines = run("nm", "-P", *options, file).splitlines()
    return [(parts[1], parts[0]) for line in lines if len(parts := line.split()) >= 2]


def exports(library: Path) -> list[str]:
    return [name for _, name in symbols(library, "-D", "--defined-only")]


@needs_binutils
def test_library_exports_only_its_api() -> None:
    declared = {name for name in dir(lib) if name.startswith("moepool_")}
    assert set(exports(LIBRARY)) == declared


@pytest.mark.skipif(shutil.which("readelf") is None, reason="no binutils")
def test_library_needs_no_cuda_library() -> None:
    needed = re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-d", LIBRARY))
    assert needed
    assert not [name for name in needed if "cuda" in name or "nvidia" in name]


def isa_sources() -> list[str]:
    files = (ROOT / "csrc" / "cpu").glob("kernels_*.cpp")
    return sorted(file.name for file in files if file.stem != "kernels_portable")


@needs_checkout
@needs_binutils
@pytest.mark.parametrize("name", isa_sources())
def test_instruction_set_files_share_nothing(name: str, tmp_path: Path) -> None:
    """A weak symbol of such a file could become the copy that every machine runs."""
    source = ROOT / "csrc" / "cpu" / name
    builder = build.Builder(ROOT, "0", os.environ, None)
    target = builder.object_of(source)
    if not target.exists():
        builder.out = tmp_path
        target = builder.object_of(source)
        build.run_stale([builder.compile_step(source)], {}, 1)
    shared = [symbol for letter, symbol in symbols(target, "--defined-only") if letter in "WVu"]
    assert shared == []


def test_build_info() -> None:
    info = moepool.build_info()
    assert info["version"] == moepool.__version__
    assert "-ffp-contract=off" in info["flags"]
    assert info["compiler"]
    assert bool(info["cuda"]) == bool(info["cuda_archs"])


@pytest.mark.parametrize("devices", ["", "-1", "99", "GPU-0", "0,,x"])
def test_import_touches_no_driver(devices: str) -> None:
    code = "import moepool; print(open('/proc/self/maps').read())"
    maps = run(sys.executable, "-c", code, env={**os.environ, "CUDA_VISIBLE_DEVICES": devices})
    assert "libmoepool.so" in maps
    assert "libcuda" not in maps
    assert "libnvidia" not in maps


@needs_checkout
def test_header_of_the_package_is_that_of_the_sources() -> None:
    assert (ROOT / "include" / "moepool.h").read_text() == HEADER


# ------------------------------------------------------------------------------------------ the device code

NVCC = build.find_nvcc(os.environ)
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc")
KERNELS = [path for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu")) if "__global__" in path.read_text()]


def ptx_without_named_fma(folder: Path, code: str, *flags: str) -> list[str]:
    """Lines of the PTX that round otherwise than the source says, once every fma by name is taken out."""
    source, out = folder / "scan.cu", folder / "scan.ptx"
    source.write_text(
        f"#include <cuda_runtime.h>\n#define __fmaf_rn(a, b, c) __fadd_rn(__fmul_rn(a, b), c)\n{code}\n"
    )
    includes = [f"-I{ROOT / 'include'}", f"-I{ROOT / 'csrc'}", "-DMOEPOOL_CUDA=1", "-arch=sm_90"]
    run(NVCC, *flags, *includes, "-ptx", source, "-o", out)
    return re.findall(r"^.*(?:\bfma\.|\.ftz|\.approx|\.full\.).*$", out.read_text(), flags=re.MULTILINE)


@needs_checkout
@needs_nvcc
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda path: str(path.stem))
def test_device_code_rounds_as_the_source_says(kernel: Path, tmp_path: Path) -> None:
    """No contraction, no flush to zero, no approximation (docs/numerics.md, section 6)."""
    assert ptx_without_named_fma(tmp_path, f'#include "{kernel}"', *build.NVCC_FLAGS) == []


@needs_checkout
@needs_nvcc
@pytest.mark.parametrize(
    ("flag", "expression"),
    [("-fmad=true", "x[0] * x[1] + x[2]"), ("-ftz=true", "x[0] + x[1]"), ("-prec-div=false", "x[0] / x[1]")],
)
def test_the_scan_sees_what_it_looks_for(flag: str, expression: str, tmp_path: Path) -> None:
    code = f"__global__ void kernel(float *x) {{ x[3] = {expression}; }}"
    assert ptx_without_named_fma(tmp_path, code, *build.NVCC_FLAGS) == []
    flags = [f for f in build.NVCC_FLAGS if not f.startswith(flag.split("=")[0])]
    assert ptx_without_named_fma(tmp_path, code, *flags, flag) != []
