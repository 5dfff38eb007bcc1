"""The instruction set of a case, for modules that use it: what the case names, or what the machine does best."""

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
