"""The kernels as other builds: for ARM under an emulator, and with AddressSanitizer and UndefinedBehaviorSanitizer."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NATIVE = ROOT / "tpi" / "kernels" / "native"
CHECK = ROOT / "tests/support/native" / "compare_isas.cpp"

pytestmark = pytest.mark.timeout(1200)  # the first run compiles everything, for minutes where nothing else runs


def tool(*names: str) -> str:
    """Path of the first of `names` that is installed; skips the test if none is."""
    beside_python = str(Path(sys.executable).parent)
    for name in names:
        found = shutil.which(name, path=beside_python + os.pathsep + os.environ.get("PATH", ""))
        if found:
            return found
    pytest.skip(f"needs {names[0]}")


def run(*command: str | Path, env: dict[str, str] | None = None) -> str:
    """Run a command in the repository; its output, which is the assertion's message if it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.fixture(scope="module")
def arm_build() -> Path:
    """The kernels for ARM with the flags that CMakeLists.txt gives each source: a directory with libkernels.a.

    It is kept: only what changed is compiled again.
    """
    compiler, cmake, ninja = tool("aarch64-linux-gnu-g++"), tool("cmake"), tool("ninja")
    pytest.importorskip("nanobind")
    build = ROOT / "build" / f"arm-{sys.version_info.major}.{sys.version_info.minor}"
    options = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "CMAKE_CXX_COMPILER": compiler,
        "CMAKE_CXX_FLAGS_RELEASE": "-O1",
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
        "Python_INCLUDE_DIR": sysconfig.get_paths()["include"],
    }
    run(cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *(f"-D{name}={value}" for name, value in options.items()))
    run(cmake, "--build", build, "--target", "kernels")
    return build


def test_neon_agrees_with_scalar_under_emulation(arm_build: Path, tmp_path: Path) -> None:
    emulator, program = tool("qemu-aarch64", "qemu-aarch64-static"), tmp_path / "compare_isas"
    flags = ["-std=c++20", "-O1", "-static", "-pthread", "-DTPI_ARM", f"-I{NATIVE}"]
    run(tool("aarch64-linux-gnu-g++"), *flags, CHECK, arm_build / "libkernels.a", "-o", program)
    # a Raspberry Pi 4 has no dot product: what uses it there is an illegal instruction
    assert run(emulator, "-cpu", "cortex-a72", program).split() == ["neon", "scalar"]
    assert run(emulator, "-cpu", "max", program).split() == ["neon_dotprod", "neon", "scalar"]


def test_no_function_of_one_instruction_set_can_serve_another(arm_build: Path) -> None:
    """The linker keeps one copy of a weak symbol, compiled with the flags of whichever source comes first."""
    symbols = run(tool("aarch64-linux-gnu-nm"), *arm_build.rglob("isa_*.cpp.o"))
    assert "kNeonDotprodKernels" in symbols
    assert [line for line in symbols.splitlines() if re.search(r" [WVu] ", line)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the sanitisers' runtime is preloaded, which needs Linux")
def test_a_sanitised_build_passes_the_same_tests() -> None:
    compiler, cmake, ninja = tool("g++"), tool("cmake"), tool("ninja")
    pytest.importorskip("nanobind")
    build = ROOT / "build" / f"sanitised-{sys.version_info.major}.{sys.version_info.minor}"
    run(
        *(
            cmake,
            "-S",
            ROOT,
            "-B",
            build,
            "-G",
            "Ninja",
            "-DCMAKE_BUILD_TYPE=Debug",
            "-DTPI_SANITIZE=ON",
            "-DTPI_EMULATE_VNNI=ON",
        ),
        *(f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_MAKE_PROGRAM={ninja}", f"-DPython_EXECUTABLE={sys.executable}"),
    )
    run(cmake, "--build", build, "--target", "_native")
    runtime = [run(compiler, f"-print-file-name={name}").strip() for name in ("libasan.so", "libubsan.so")]
    env = {
        "TPI_NATIVE_MODULE": str(next(build.glob("_native*.so"))),
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONMALLOC": "malloc",
    }
    parts = ("", "_checks", "_chain", "_steps", "_experts", "_heads")
    tests = [f"tests/unit/kernels/test_kernels{part}.py" for part in parts]
    run(sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.support.native.module", *tests, env=env)
