"""Compiles libmoepool.so, its cffi binding and the simulator.

setup.py loads this file by its path, so that a build never imports moepool. Every file of csrc/ is compiled
for itself, all cores at once, into build/native; it is compiled again if its source, a header that it
includes, its command or its compiler changed since. An unchanged tree compiles nothing.

What the environment decides (empty counts as unset):

MOEPOOL_CUDA
    ``auto`` (default): CUDA if nvcc is found, else a CPU-only build and a notice; an nvcc that fails fails
    the build. ``on``: nvcc must be there. ``off``: no CUDA. ``fallback``: as ``auto``, but if nvcc fails its
    message is shown and the build goes on for the CPU only.
MOEPOOL_CUDA_ARCHS
    ``native`` (default): the GPUs of this machine, 90 where there is none. ``all``: every architecture of
    TUNED_ARCHS that the toolkit knows. Or a list: ``80;90``. The last is kept as PTX too, for newer GPUs.
CUDACXX
    The nvcc to use. Without it: the first in CUDA_HOME/bin, CUDA_PATH/bin, PATH and /usr/local/cuda/bin.
CC, CXX
    The C and the C++ compiler, cc and c++ by default.
CPPFLAGS, CFLAGS, CXXFLAGS, LDFLAGS
    Added to the commands, behind moepool's defaults (-O3, warnings) and before the flags that its results
    depend on. Flags that would change a result (-ffast-math and its kind) are refused.
NVCC_PREPEND_FLAGS, NVCC_APPEND_FLAGS
    Read by nvcc itself.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "lib/libmoepool.so"
BINDING = "_native/_lib.abi3.so"
HEADER = "include/moepool.h"
CMAKE_VERSION = "cmake/moepoolConfigVersion.cmake"
# pybind11 has no stable ABI: this module is of the Python that builds it.
SIMULATOR = f"_sim{sysconfig.get_config_var('EXT_SUFFIX')}"
PRODUCTS = (LIBRARY, BINDING, SIMULATOR, HEADER, CMAKE_VERSION)

# What the simulator shares with the pools, so that both follow one law: the same object files.
SHARED_WITH_SIMULATOR = ("pool/residency.cpp",)

TUNED_ARCHS = ("75", "80", "86", "89", "90", "100", "120")
ARCH_WITHOUT_GPU = "90"

AVX512_FLAGS = "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx2 -mfma -mf16c"

# The instruction set of a file, by its stem. Such a file holds nothing with external linkage but its kernel
# table: the linker could pick its copy of a shared inline function for callers that run on every machine.
ISA_FLAGS = {
    "kernels_avx2": "-mavx2 -mfma -mf16c",
    "kernels_avxvnni": "-mavxvnni -mavx2 -mfma -mf16c",
    "kernels_avx512": AVX512_FLAGS,
    "kernels_amx": AVX512_FLAGS,  # its tile instructions are in assembler: older compilers do not know them
}

# Defaults stand before the user's flags and give way to them, requirements stand behind and hold. LTO would
# compile at link time, across files that differ in their instruction set.
CXX_DEFAULTS = ["-O3", "-Wall", "-Wextra", "-Wno-unknown-pragmas"]
CXX_REQUIRED = [
    "-std=c++17",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-lto",
    "-fno-math-errno",
    "-ffp-contract=off",
]
NVCC_FLAGS = ["-O3", "-std=c++17", "-fmad=false", "-cudart", "static"]
NVCC_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-ffp-contract=off"

# Until 1.0 a minor version may break its users, later a major one.
CMAKE_VERSION_TEXT = """\
set(PACKAGE_VERSION "@VERSION@")
set(PACKAGE_VERSION_COMPATIBLE FALSE)
if(PACKAGE_VERSION VERSION_EQUAL "${PACKAGE_FIND_VERSION}")
  set(PACKAGE_VERSION_EXACT TRUE)
endif()
if(PACKAGE_FIND_VERSION_RANGE)
  if(PACKAGE_VERSION VERSION_GREATER_EQUAL PACKAGE_FIND_VERSION_MIN
     AND (PACKAGE_VERSION VERSION_LESS PACKAGE_FIND_VERSION_MAX
          OR (PACKAGE_FIND_VERSION_RANGE_MAX STREQUAL "INCLUDE"
              AND PACKAGE_VERSION VERSION_EQUAL PACKAGE_FIND_VERSION_MAX)))
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
  endif()
elseif(NOT PACKAGE_VERSION VERSION_LESS "${PACKAGE_FIND_VERSION}")
  string(REGEX MATCH "^(0\\\\.[0-9]+|[1-9][0-9]*)" _moepool_series "${PACKAGE_VERSION}")
  string(REGEX MATCH "^(0\\\\.[0-9]+|[0-9]+)" _moepool_wanted "${PACKAGE_FIND_VERSION}")
  if(_moepool_wanted STREQUAL _moepool_series
     OR (PACKAGE_FIND_VERSION_COUNT EQUAL 1 AND PACKAGE_FIND_VERSION_MAJOR EQUAL 0
         AND PACKAGE_VERSION VERSION_LESS 1))
    set(PACKAGE_VERSION_COMPATIBLE TRUE)
  endif()
  unset(_moepool_series)
  unset(_moepool_wanted)
endif()
"""

RESULT_CHANGING = re.compile(
    r"(?<![\w-])(-Ofast|-ffast-math|-funsafe-math-optimizations|-fassociative-math|-freciprocal-math"
    r"|-ffinite-math-only|-fno-signed-zeros|-fsingle-precision-constant|-fcx-limited-range|-mrecip|-mdaz-ftz"
    r"|-mfpmath=387|--?use_fast_math|--?ftz[= ]true|--?fmad[= ]true|--?prec-(?:div|sqrt)[= ]false)(?![\w-])"
)
FLAG_VARIABLES = ("CPPFLAGS", "CFLAGS", "CXXFLAGS", "LDFLAGS", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


class BuildError(Exception):
    """The build cannot go on; the message is for the person who runs it."""


class NvccError(BuildError):
    """nvcc, or what belongs to it, failed."""


def notice(text: str) -> None:
    """Tell the person who builds, on stderr."""
    print(f"moepool: {text}", file=sys.stderr, flush=True)


def capture(command: Sequence[str], error: type[BuildError] = BuildError) -> str:
    """Output (stdout and stderr) of a command that has to succeed."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
    except OSError as problem:
        raise error(f"cannot run {command[0]}: {problem.strerror}") from problem
    if done.returncode != 0:
        raise error(f"{shlex.join(command)}\nfailed with exit status {done.returncode}:\n{done.stdout}")
    return done.stdout


# ------------------------------------------------------------------------------------------------ the binding


def cdef(header: str) -> str:
    """The declarations of moepool.h as cffi reads them: no comments, preprocessor lines or export marks."""
    header = re.sub(r"/\*.*?\*/", " ", header, flags=re.DOTALL)
    header = re.sub(r"^#ifdef __cplusplus$.*?^#endif$", "", header, flags=re.DOTALL | re.MULTILINE)
    header = re.sub(r"^\s*#.*$", "", header, flags=re.MULTILINE)
    return re.sub(r"\bMOEPOOL_API\b\s*", "", header)


def emit_binding(header: Path, source: Path) -> None:
    """Write the C source of the extension module moepool._native._lib."""
    from cffi import FFI, recompiler

    ffi = FFI()
    ffi.cdef(cdef(header.read_text()))
    ffi.cdef('extern "Python" int32_t run_signal_handlers(void *);')
    recompiler.make_c_source(ffi, "moepool._native._lib", '#include "moepool.h"', str(source))


# ------------------------------------------------------------------------------------------------------- CUDA


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit and the architectures to compile for."""

    nvcc: str
    version: str
    archs: tuple[str, ...]
    includes: tuple[str, ...]
    libraries: tuple[str, ...]

    @property
    def gencode(self) -> list[str]:
        """nvcc's flags: machine code for each architecture, and PTX of the last."""
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in self.archs]
        return [*codes, f"-gencode=arch=compute_{self.archs[-1]},code=compute_{self.archs[-1]}"]


def find_nvcc(env: Mapping[str, str], default: str = "/usr/local/cuda") -> str | None:
    """Path of the nvcc to use, None if there is none; a CUDACXX that is not there is an error."""
    if env.get("CUDACXX"):
        named = shutil.which(env["CUDACXX"], path=env.get("PATH"))
        if named is None:
            raise NvccError(f"CUDACXX={env['CUDACXX']} is not a program that can be run")
        return named
    homes = [env[name] for name in ("CUDA_HOME", "CUDA_PATH") if env.get(name)]
    folders = [*(f"{home}/bin" for home in homes), env.get("PATH", ""), f"{default}/bin"]
    return next((found for folder in folders if (found := shutil.which("nvcc", path=folder))), None)


def gpu_archs() -> list[str]:
    """Compute capabilities of this machine's GPUs without the dot, [] if there are none to see."""
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = re.findall(r"^(\d+)\.(\d)$", done.stdout, flags=re.MULTILINE)
    return sorted({major + minor for major, minor in found}, key=int)


def select_archs(
    wanted: str, known: Sequence[str], gpus: Callable[[], list[str]] = gpu_archs
) -> tuple[str, ...]:
    """The architectures that MOEPOOL_CUDA_ARCHS stands for, in rising order; the toolkit knows each."""

    def number(arch: str) -> int:
        return int(arch.rstrip("af"))

    newest = max(known, key=number)
    if wanted == "all":
        skipped = [arch for arch in TUNED_ARCHS if arch not in known]
        if skipped:
            notice(f"this CUDA toolkit does not know the architectures {', '.join(skipped)}: left out")
        return tuple(arch for arch in TUNED_ARCHS if arch in known)
    if wanted == "native":
        here = gpus() or [ARCH_WITHOUT_GPU]
        newer = [arch for arch in here if number(arch) > number(newest)]
        if newer:
            notice(
                f"this CUDA toolkit does not know GPU architecture {newer[-1]}: it gets the PTX of {newest}"
            )
        archs = {newest if arch in newer else arch for arch in here}
    else:
        archs = {arch for arch in re.split(r"[;,\s]+", wanted) if arch}
        if not archs or not all(re.fullmatch(r"\d{2,3}[af]?", arch) for arch in archs):
            raise BuildError(f"MOEPOOL_CUDA_ARCHS={wanted!r} is neither native nor all nor a list like 80;90")
    unknown = sorted((arch for arch in archs if arch.rstrip("af") not in known), key=number)
    if unknown:
        raise NvccError(
            f"this CUDA toolkit does not know the architectures {', '.join(unknown)}, only {', '.join(known)}"
        )
    return tuple(sorted(archs, key=number))


def load_toolkit(nvcc: str, env: Mapping[str, str]) -> Toolkit:
    """Ask an nvcc for its version, its architectures and its folders."""
    version = re.search(r"release (\d+\.\d+)", capture([nvcc, "--version"], NvccError))
    known = re.findall(r"compute_(\d+)", capture([nvcc, "--list-gpu-arch"], NvccError))
    profile = capture([nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], NvccError)
    includes = re.search(r'^#\$ INCLUDES="?-I([^"\n]*?)"?\s*$', profile, flags=re.MULTILINE)
    libraries = re.search(r"^#\$ LIBRARIES=(.*)$", profile, flags=re.MULTILINE)
    if not version or not known or not libraries:
        raise NvccError(f"{nvcc} does not answer as nvcc does:\n{profile}")
    if tuple(map(int, version[1].split("."))) < (12, 3):
        raise NvccError(
            f"{nvcc} is of CUDA {version[1]}, moepool needs 12.3 or newer: set CUDACXX to another nvcc, or "
            "MOEPOOL_CUDA=off"
        )
    archs = select_archs(env.get("MOEPOOL_CUDA_ARCHS") or "native", sorted(known, key=int))
    # Debian's own toolkit has its headers in /usr/include and names no folder.
    folders = ("-isystem", includes[1]) if includes else ()
    return Toolkit(nvcc, version[1], archs, folders, tuple(shlex.split(libraries[1])))


def plan_cuda(env: Mapping[str, str], default: str = "/usr/local/cuda") -> Toolkit | None:
    """The toolkit to build with, None for a CPU-only build."""
    mode = env.get("MOEPOOL_CUDA") or "auto"
    if mode not in ("auto", "on", "off", "fallback"):
        raise BuildError(f"MOEPOOL_CUDA={mode!r} is none of auto, on, off, fallback")
    if mode == "off":
        return None
    try:
        nvcc = find_nvcc(env, default)
        if nvcc is not None:
            return load_toolkit(nvcc, env)
    except NvccError as error:
        if mode != "fallback":
            raise
        notice(f"{error}\nmoepool: building for the CPU only, as MOEPOOL_CUDA=fallback asks")
        return None
    if mode == "on":
        raise BuildError(
            "MOEPOOL_CUDA=on, but no nvcc was found: set CUDACXX or CUDA_HOME, or put nvcc on PATH"
        )
    notice("no nvcc found: building for the CPU only")
    return None


# ------------------------------------------------------------------------------------------ incremental steps


@dataclass(frozen=True)
class Step:
    """One command that makes one file from others; `depfile` names what it read beyond `inputs`."""

    label: str
    command: list[str]
    output: Path
    inputs: tuple[Path, ...]
    depfile: Path | None = None
    error: type[BuildError] = BuildError

    @property
    def stamp(self) -> Path:
        """Where the state that `output` was made from is written down."""
        return self.output.with_name(self.output.name + ".json")

    def is_fresh(self, identity: list[str]) -> bool:
        """Whether `output` is what the command would make now."""
        try:
            made = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            return False
        return (
            self.output.exists()
            and made["command"] == identity
            and all(digest(Path(name)) == value for name, value in made["files"].items())
        )

    def run(self, identity: list[str]) -> None:
        """Run the command and write the stamp."""
        print(f"  {self.label}\n", end="", flush=True)  # one write: several run at once
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.stamp.unlink(missing_ok=True)
        start = time.time_ns()
        output = capture(self.command, self.error)
        if output.strip():
            print(output, file=sys.stderr, end="", flush=True)
        files = {*self.inputs, *(read_depfile(self.depfile) if self.depfile else ())}
        # A file that changed while the compiler read it counts as unknown, so that it is compiled again.
        state = {str(file): digest(file) if file.stat().st_mtime_ns < start else None for file in files}
        self.stamp.write_text(json.dumps({"command": identity, "files": state}))


def digest(file: Path) -> str | None:
    """Hash of a file's content, None if it is not there."""
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def read_depfile(depfile: Path) -> set[Path]:
    """The files that a compiler's -MMD output names."""
    _, _, names = depfile.read_text().replace("\\\n", " ").partition(": ")
    return {Path(name.replace("\\ ", " ")) for name in re.findall(r"(?:\\ |\S)+", names)}


def run_stale(steps: Iterable[Step], identities: Mapping[str, str], jobs: int) -> None:
    """Run the steps whose output is not fresh, `jobs` at once; after a failure no other starts."""
    stale: list[tuple[Step, list[str]]] = []
    for step in steps:
        identity = [identities.get(step.command[0], ""), *step.command]
        if not step.is_fresh(identity):
            stale.append((step, identity))
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(step.run, identity) for step, identity in stale]
        try:
            for one in running:
                one.result()
        except BuildError:
            pool.shutdown(cancel_futures=True)
            raise


# ------------------------------------------------------------------------------------------------ the builder


class Builder:
    """Knows the commands that build a source tree.

    Parameters
    ----------
    root
        The source tree: include/, csrc/ and moepool/ lie in it, build/ is made in it.
    version
        moepool's version, "1.2.3".
    env
        The environment, see the head of this file.
    cuda
        The toolkit to compile csrc/**/*.cu with, None to leave them out.
    """

    def __init__(self, root: Path, version: str, env: Mapping[str, str], cuda: Toolkit | None) -> None:
        self.root = root
        self.version = version
        self.env = env
        self.cuda = cuda
        self.out = root / "build" / "native"
        self.cc = shlex.split(env.get("CC") or "cc")
        self.cxx = shlex.split(env.get("CXX") or "c++")
        self.c_flags = [*self._user("CPPFLAGS"), *self._user("CFLAGS")]
        self.cxx_flags = [*CXX_DEFAULTS, *self.c_flags, *self._user("CXXFLAGS"), *CXX_REQUIRED]
        self.includes = [f"-I{root / 'include'}", f"-I{root / 'csrc'}"]
        for name in FLAG_VARIABLES:
            if found := RESULT_CHANGING.search(env.get(name, "")):
                raise BuildError(
                    f"{name} holds {found[0]}, which changes the bits of results; moepool's are fixed "
                    f"(docs/numerics.md). Take it out of {name} and build again."
                )

    def _user(self, name: str) -> list[str]:
        return shlex.split(self.env.get(name, ""))

    def sources(self) -> list[Path]:
        """The files that make libmoepool.so; csrc/sim is a module of its own."""
        csrc = self.root / "csrc"
        suffixes = (".cpp", ".cu") if self.cuda else (".cpp",)
        files = (file for file in csrc.rglob("*") if file.suffix in suffixes)
        return sorted(file for file in files if csrc / "sim" not in file.parents)

    def object_of(self, source: Path) -> Path:
        """Where the object of a source lies."""
        return self.out / source.relative_to(self.root).with_name(source.name + ".o")

    def compile_step(self, source: Path) -> Step:
        """How to compile one file of csrc/."""
        target = self.object_of(source)
        depfile = target.with_suffix(".d")
        files = ["-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(target)]
        define_cuda = ["-DMOEPOOL_CUDA=1"] if self.cuda else []
        label = str(source.relative_to(self.root))
        if source.suffix == ".cu":
            assert self.cuda is not None
            host = ["-ccbin", self.cxx[-1], "-Xcompiler", NVCC_HOST_FLAGS]
            command = [
                self.cuda.nvcc,
                *NVCC_FLAGS,
                *self.cuda.gencode,
                *host,
                *define_cuda,
                *self.includes,
                *files,
            ]
            return Step(label, command, target, (source,), depfile, NvccError)
        toolkit = self.cuda.includes if self.cuda else ()
        isa = self._isa_flags(source)
        about = self._build_defines() if source.stem == "api" else []
        command = [*self.cxx, *isa, *self.cxx_flags, *define_cuda, *about, *self.includes, *toolkit, *files]
        return Step(label, command, target, (source,), depfile)

    def _isa_flags(self, source: Path) -> list[str]:
        x86 = platform.machine() in ("x86_64", "AMD64")
        return ISA_FLAGS.get(source.stem, "").split() if x86 else []

    def _build_defines(self) -> list[str]:
        facts = {
            "MOEPOOL_VERSION": self.version,
            "MOEPOOL_BUILD_CXX": compiler_identity(self.cxx),
            "MOEPOOL_BUILD_FLAGS": shlex.join(self.cxx_flags),
            "MOEPOOL_BUILD_CUDA": self.cuda.version if self.cuda else "",
            "MOEPOOL_BUILD_CUDA_ARCHS": ",".join(self.cuda.archs) if self.cuda else "",
        }
        # Escaped twice: the strings are C literals, and their content stands between quotes in a JSON text.
        return [f"-D{name}={json.dumps(json.dumps(fact)[1:-1])}" for name, fact in facts.items()]

    def library_step(self, objects: Sequence[Path]) -> Step:
        """How to link libmoepool.so; whatever objects and archives define, only moepool_* is visible."""
        exports = self.out / "exports.map"
        write_if_changed(exports, "{ global: moepool_*; local: *; };\n")
        target = self.out / Path(LIBRARY).name
        checks = ["-Wl,-z,defs", "-Wl,-z,now", f"-Wl,--version-script={exports}", "-Wl,--exclude-libs,ALL"]
        libraries = ["-pthread"]
        if self.cuda:
            libraries = [*self.cuda.libraries, "-lcudart_static", "-ldl", "-lrt", "-pthread"]
        flags = [*self.cxx_flags, f"-Wl,-soname,{target.name}", *checks, *self._user("LDFLAGS")]
        command = [*self.cxx, "-shared", *flags, *map(str, objects), *libraries, "-o", str(target)]
        return Step(target.name, command, target, (*objects, exports))

    def binding_steps(self, library: Path) -> tuple[Step, Step]:
        """How to compile and link the cffi module; it finds the library beside itself in the package."""
        python = python_headers()
        source, target = self.out / "_lib.c", self.out / Path(BINDING).name
        emit_binding(self.root / HEADER, source)
        object_, depfile = self.out / "_lib.o", self.out / "_lib.d"
        flags = ["-O2", *self.c_flags, "-fPIC", "-fvisibility=hidden", "-DPy_LIMITED_API=0x030b0000"]
        files = ["-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(object_)]
        compile_ = [*self.cc, *flags, self.includes[0], f"-I{python}", *files]
        # -z now: a function that the library lacks fails the import, not some later call.
        where = ["-Wl,-z,now", "-Wl,-rpath,$ORIGIN/../lib", f"-L{library.parent}", f"-l:{library.name}"]
        link = [
            *self.cc,
            "-shared",
            *self.c_flags,
            *self._user("LDFLAGS"),
            str(object_),
            *where,
            "-o",
            str(target),
        ]
        return (
            Step(source.name, compile_, object_, (source,), depfile),
            Step(target.name, link, target, (object_, library)),
        )

    def simulator_steps(self) -> tuple[list[Step], Step]:
        """How to compile csrc/sim and to link it with what it shares with the library, of which it needs
        nothing else."""
        import pybind11

        headers = [f"-I{python_headers()}", "-isystem", pybind11.get_include()]
        compile_ = []
        for source in sorted((self.root / "csrc" / "sim").glob("*.cpp")):
            # For the Python that builds: another one finds no object of its own.
            target = self.object_of(source).with_suffix(f".{sys.implementation.cache_tag}.o")
            depfile = target.with_suffix(".d")
            files = ["-MMD", "-MF", str(depfile), "-c", str(source), "-o", str(target)]
            command = [*self.cxx, *self.cxx_flags, *self.includes, *headers, *files]
            compile_.append(Step(str(source.relative_to(self.root)), command, target, (source,), depfile))
        shared = [self.object_of(self.root / "csrc" / name) for name in SHARED_WITH_SIMULATOR]
        objects = (*(step.output for step in compile_), *shared)
        target = self.out / SIMULATOR
        link = [*self.cxx, "-shared", *self.cxx_flags, *self._user("LDFLAGS"), *map(str, objects), "-pthread"]
        return compile_, Step(target.name, [*link, "-o", str(target)], target, objects)

    def cmake_version(self) -> Path:
        """Write the file by which find_package(moepool 0.1 CONFIG) knows whether this version will do."""
        file = self.out / Path(CMAKE_VERSION).name
        numbers = re.match(r"\d+(\.\d+)*", self.version)
        assert numbers is not None
        write_if_changed(file, CMAKE_VERSION_TEXT.replace("@VERSION@", numbers[0]))
        return file

    def build(self, package: Path, jobs: int) -> None:
        """Compile what changed and lay PRODUCTS into the folder `package`."""
        self.out.mkdir(parents=True, exist_ok=True)
        compilers = (self.cc, self.cxx, [self.cuda.nvcc] if self.cuda else [])
        identities = {one[0]: compiler_identity(one) for one in compilers if one}
        # nvcc reads these by itself: they are part of its commands.
        if self.cuda:
            own = [self.env.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")]
            identities[self.cuda.nvcc] = " ".join([identities[self.cuda.nvcc], *own])
        objects = [self.compile_step(source) for source in self.sources()]
        library = self.library_step([step.output for step in objects])
        compile_binding, binding = self.binding_steps(library.output)
        compile_simulator, simulator = self.simulator_steps()
        run_stale([*objects, compile_binding, *compile_simulator], identities, jobs)
        run_stale([library, simulator], identities, jobs)
        run_stale([binding], identities, 1)
        made = (
            library.output,
            binding.output,
            simulator.output,
            self.root / HEADER,
            self.cmake_version(),
        )
        for product, file in zip(PRODUCTS, made, strict=True):
            install(file, package / product)


def python_headers() -> Path:
    """The folder of Python.h."""
    python = Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").exists():
        raise BuildError(
            f"{python}/Python.h is missing: install Python's headers (Debian: apt install python3-dev)"
        )
    return python


def compiler_identity(command: Sequence[str]) -> str:
    """The last line of nvcc's, the first of any other compiler's --version."""
    try:
        lines = capture([*command, "--version"]).strip().splitlines()
    except BuildError as error:
        raise BuildError(
            f"{error}\nmoepool needs a C and a C++17 compiler (Debian: apt install g++)"
        ) from None
    return lines[-1] if "nvcc" in lines[0] else lines[0]


def write_if_changed(file: Path, text: str) -> None:
    """Write a text file unless it already holds the text."""
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def install(made: Path, target: Path) -> None:
    """Copy a file in one move, so that a process which has the old one mapped keeps it."""
    if digest(made) == digest(target):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(target.name + ".new")
    shutil.copy2(made, beside)
    beside.replace(target)


def build(root: Path, package: Path, version: str, env: Mapping[str, str], jobs: int | None = None) -> None:
    """Build the tree `root` and lay PRODUCTS into `package`; one build of a tree runs at a time."""
    jobs = jobs or len(os.sched_getaffinity(0))
    folder = root / "build" / "native"
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            cuda = plan_cuda(env) if any((root / "csrc").rglob("*.cu")) else None
            Builder(root, version, env, cuda).build(package, jobs)
        except NvccError as error:
            if env.get("MOEPOOL_CUDA") != "fallback":
                raise
            notice(f"{error}\nmoepool: building for the CPU only, as MOEPOOL_CUDA=fallback asks")
            Builder(root, version, env, None).build(package, jobs)
