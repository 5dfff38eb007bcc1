"""The kernels as other builds: by Clang, for ARM under an emulator, and with sanitisers of addresses and behaviour."""

import os
import platform
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


def build_with(compiler: str, kind: str, flags: str, options: dict[str, str], *targets: str) -> Path:
    """Build `targets` (default: all) into a directory of this `kind` and return it; warnings are errors.

    The directory is kept: only what changed is compiled again.
    """
    cmake, ninja = tool("cmake"), tool("ninja")
    pytest.importorskip("nanobind")
    build = ROOT / "build" / f"{kind}-{sys.version_info.major}.{sys.version_info.minor}"
    options = {
        "CMAKE_CXX_COMPILER": compiler,
        "CMAKE_CXX_FLAGS": "-Wall -Wextra -Werror",
        "CMAKE_CXX_FLAGS_RELEASE": flags,
        "CMAKE_MAKE_PROGRAM": ninja,
        "Python_EXECUTABLE": sys.executable,
        **options,
    }
    run(cmake, "-S", ROOT, "-B", build, "-G", "Ninja", *(f"-D{name}={value}" for name, value in options.items()))
    run(cmake, "--build", build, *(word for target in targets for word in ("--target", target)))
    return build


@pytest.fixture(scope="module")
def arm_build() -> Path:
    """The kernels for ARM with the flags that CMakeLists.txt gives each source: a directory with libkernels.a."""
    options = {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": "aarch64",
        "Python_INCLUDE_DIR": sysconfig.get_paths()["include"],
    }
    return build_with(tool("aarch64-linux-gnu-g++"), "arm", "-O1", options, "kernels")


def compare_isas(compiler: str, library: Path, definition: str, program: Path, *flags: str) -> None:
    """Build the program that compares all instruction sets of `library`, the static library of the kernels."""
    run(compiler, "-std=c++20", "-O1", "-pthread", *flags, definition, f"-I{NATIVE}", CHECK, library, "-o", program)


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="emulates an instruction of x86-64")
@pytest.mark.skipif(sys.platform != "linux", reason="the emulation reads the registers as Linux saves them")
def test_clang_builds_everything_and_all_instruction_sets_agree(tmp_path: Path) -> None:
    compiler, program = tool("clang++", "clang++-14"), tmp_path / "compare_isas"
    build = build_with(compiler, "clang", "-O0", {})
    compare_isas(compiler, build / "libkernels.a", "-DTPI_X86", program)
    names = set(run(program).split())
    assert names - {"avx512"} == {"avx_vnni", "avx2", "scalar"}


def test_neon_agrees_with_scalar_under_emulation(arm_build: Path, tmp_path: Path) -> None:
    emulator, program = tool("qemu-aarch64", "qemu-aarch64-static"), tmp_path / "compare_isas"
    compare_isas(tool("aarch64-linux-gnu-g++"), arm_build / "libkernels.a", "-DTPI_ARM", program, "-static")
    # a Raspberry Pi 4 has no dot product: what uses it there is an illegal instruction
    assert run(emulator, "-cpu", "cortex-a72", program).split() == ["neon", "scalar"]
    assert run(emulator, "-cpu", "max", program).split() == ["neon_i8mm", "neon_dotprod", "neon", "scalar"]


def test_no_function_of_one_instruction_set_can_serve_another(arm_build: Path) -> None:
    """The linker keeps one copy of a weak symbol, compiled with the flags of whichever source comes first."""
    symbols = run(tool("aarch64-linux-gnu-nm"), *arm_build.rglob("isa_*.cpp.o"))
    assert "kNeonI8mmKernels" in symbols
    assert [line for line in symbols.splitlines() if re.search(r" [WVu] ", line)] == []


@pytest.mark.skipif(sys.platform != "linux", reason="the sanitisers' runtime is preloaded, which needs Linux")
def test_a_sanitised_build_passes_the_same_tests() -> None:
    compiler = tool("g++")
    options = {"CMAKE_BUILD_TYPE": "Debug", "TPI_SANITIZE": "ON", "TPI_EMULATE_VNNI": "ON"}
    build = build_with(compiler, "sanitised", "", options, "_native")
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
