"""Builds the native part of moepool, as moepool/_native/build.py says; the rest is in pyproject.toml."""

import importlib.util
import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

ROOT = Path(__file__).resolve().parent

_spec = importlib.util.spec_from_file_location(
    "moepool_native_build", ROOT / "moepool" / "_native" / "build.py"
)
assert _spec is not None and _spec.loader is not None
native = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = native  # dataclasses look their module up there
_spec.loader.exec_module(native)


class BuildNative(build_ext):
    """Lays libmoepool.so, the two extension modules and the header into the package.

    That of the source tree for an editable install and with --inplace, else that of the build folder.
    """

    def run(self) -> None:
        try:
            native.build(ROOT, self._package(), self.distribution.get_version(), os.environ, self.parallel)
        except native.BuildError as error:
            raise CompileError(str(error)) from None

    def _package(self) -> Path:
        return ROOT / "moepool" if self.inplace else Path(self.build_lib).resolve() / "moepool"

    def get_outputs(self) -> list[str]:
        return [str(self._package() / product) for product in native.PRODUCTS]

    def get_output_mapping(self) -> dict[str, str]:
        if not self.inplace:
            return {}
        built = Path(self.build_lib) / "moepool"
        return {str(built / product): str(ROOT / "moepool" / product) for product in native.PRODUCTS}


setup(
    cmdclass={"build_ext": BuildNative},
    # The binding would serve every Python from 3.11 on; the simulator is of one, and so is a wheel of both.
    ext_modules=[
        Extension("moepool._native._lib", sources=[], py_limited_api=True),
        Extension("moepool._sim", sources=[]),
    ],
)
