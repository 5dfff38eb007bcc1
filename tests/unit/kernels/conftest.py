"""The instruction set of a test: the one that its parameters name, or else the best of this machine."""

from collections.abc import Iterator

import pytest

from tests.support.kernels.kernel_cases import native


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before, threads = native.isa(), native.threads()
    native.use_isa(getattr(request, "param", before))
    native.set_threads(2)
    yield native.isa()
    native.use_isa(before)
    native.set_threads(threads)
