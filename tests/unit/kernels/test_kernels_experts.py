"""Experts: native kernels agree with the reference, a chain with its parts, and pieces add up to the whole."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.expert_cases import ExpertsCase, experts_case
from tests.support.kernels.isas import over_isas
from tests.support.kernels.kernel_cases import ffn_case, native, norm_spec, normal, reference
from tests.support.kernels.pairwise import pairwise
from tpi.config import Format, Mixture
from tpi.errors import KernelError
from tpi.kernels import Kernels
from tpi.kernels.mixture import Normed, choose, parts_of
from tpi.kernels.spec import F32, NO_TOKENS, SHARED, ChainBlock, ExpertPiece, ExpertsSpec, Residual, RouterSpec, Routing
from tpi.pack.layout import Layout

FORMATS: list[tuple[Format, Layout | None]] = [
    ("f32", None), ("bf16", None), ("q8", None), ("q4", None), ("q4s", None), ("q4", "record"), ("q8", "record"),
]  # fmt: skip


def run(case: ExpertsCase) -> tuple[F32, F32]:
    """Return the results of native kernels and of the reference, with the reference's routing."""
    routing = reference.route(case.spec.router, case.x)
    expected = reference.experts(case.spec, case.data, case.x, routing)
    return native.experts(case.spec, case.data, native.prepare(case.spec, case.x), routing), expected


def error(got: F32, expected: F32) -> float:
    return float(np.abs(got - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(("format", "layout"), FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 17, 70])
def test_native_kernels_agree_with_the_reference(format: Format, layout: Layout | None, tokens: int) -> None:
    random = np.random.default_rng(tokens)
    tolerance = {"q8": 5e-4, "q4": 2e-2, "q4s": 2e-2}.get(format, 2e-5)
    for shared, bias in ((0, False), (3, True)):
        case = experts_case(
            random, format=format, layout=layout, tokens=tokens, shared=shared, gate=bias, bias=bias, hidden=96
        )
        assert error(*run(case)) < tolerance


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_shared_experts_may_have_another_format(tokens: int) -> None:
    random = np.random.default_rng(1)
    pairs: list[tuple[Format, Format]] = [("q4", "q8"), ("q8", "f32"), ("f32", "q4")]
    for format, other in pairs:
        case = experts_case(random, format=format, shared=2, shared_format=other, tokens=tokens)
        assert error(*run(case)) < 1e-4


@pytest.mark.parametrize("format", ["f32", "q4"])
@pytest.mark.parametrize("tokens", [1, 3, 30])
def test_pieces_add_up_to_the_whole(format: Format, tokens: int) -> None:
    case = experts_case(np.random.default_rng(3), format=format, tokens=tokens, shared=2, units=3)
    routing = reference.route(case.spec.router, case.x)
    whole = native.experts(case.spec, case.data, case.x, routing)
    unit, begin = case.spec.routed.neuron.unit_bytes, 2 * case.spec.routed.neuron.unit_bytes
    halves = [[(0, 3), (1, 2)], [(1, 1), (2, 3), (3, 3), (4, 3), (5, 3)]]
    total, at = np.zeros_like(whole), begin
    for number, half in enumerate(halves):
        pieces = tuple(ExpertPiece(expert, units) for expert, units in half)
        end = at + unit * sum(piece.units for piece in pieces)
        spec = part_of(case.spec, pieces, shared=number == 0)
        data = np.concatenate([case.data[: 0 if number else begin], case.data[at:end]])
        total += native.experts(spec, data, case.x, routing)
        at = end
    assert at == len(case.data)
    np.testing.assert_allclose(total, whole, atol=3e-5 if format == "f32" else 2e-2 * np.abs(whole).max())


@pytest.mark.parametrize(("format", "tokens", "shared"), pairwise(["f32", "q4", "q8"], [1, 3, 30], [0, 2]))
def test_some_pieces_may_lie_anywhere(format: Format, tokens: int, shared: int) -> None:
    """Holds for both kinds of kernels; all pieces together give the routed part of the whole."""
    case = experts_case(np.random.default_rng(4), format=format, tokens=tokens, shared=shared, units=3, gate=shared > 0)
    routing, size = reference.route(case.spec.router, case.x), 3 * case.spec.routed.neuron.unit_bytes
    begin = len(case.data) - size * len(case.spec.pieces)
    apart = {number: case.data[begin + number * size :][:size].copy() for number in (5, 0, 3, 2, 1, 4)}
    routed = part_of(case.spec, case.spec.pieces, shared=False)
    whole = native.experts(routed, case.data[begin:], case.x, routing)
    assert np.array_equal(native.expert_pieces(case.spec, apart, case.x, routing), whole)
    some = {number: apart[number] for number in (4, 1)}
    own = native.expert_pieces(case.spec, some, native.prepare(case.spec, case.x), routing)
    plain = reference.expert_pieces(case.spec, some, case.x, routing)
    np.testing.assert_allclose(own, plain, atol=1e-4 * np.abs(whole).max())
    rest = native.expert_pieces(case.spec, {number: apart[number] for number in (0, 2, 3, 5)}, case.x, routing)
    np.testing.assert_allclose(own + rest, whole, atol=3e-5 if format == "f32" else 2e-2 * np.abs(whole).max())
    assert not native.expert_pieces(case.spec, {}, case.x, routing).any()


@pytest.mark.parametrize(("format", "tokens", "gate"), pairwise(["f32", "q4"], [1, 3, 30], [True, False]))
def test_shared_experts_may_be_among_the_pieces(format: Format, tokens: int, gate: bool) -> None:
    """One call then computes the whole block with the same bits; alone, shared experts are the remaining part."""
    case = experts_case(np.random.default_rng(6), format=format, tokens=tokens, shared=2, units=3, gate=gate, bias=True)
    routing, parts = reference.route(case.spec.router, case.x), parts_of(case.spec)
    whole = native.experts(case.spec, case.data, case.x, routing)
    apart = {number: case.data[part.begin : part.end].copy() for number, part in enumerate(parts, SHARED)}
    assert np.array_equal(native.expert_pieces(case.spec, apart, case.x, routing), whole)
    plain = reference.expert_pieces(case.spec, apart, case.x, routing)
    np.testing.assert_allclose(whole, plain, atol=(2e-5 if format == "f32" else 2e-2) * np.abs(whole).max())
    beside = native.expert_pieces(case.spec, {SHARED: apart.pop(SHARED)}, case.x, routing)
    routed = native.expert_pieces(case.spec, apart, case.x, routing)
    np.testing.assert_allclose(beside + routed, whole, atol=(2e-5 if format == "f32" else 2e-2) * np.abs(whole).max())


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
def test_shared_experts_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    with_them, without = (experts_case(np.random.default_rng(4), shared=shared) for shared in (2, 0))
    size = 2 * with_them.spec.routed.neuron.unit_bytes
    for case, weights in ((without, without.data[:size]), (with_them, with_them.data[: size - 1])):
        routing = reference.route(case.spec.router, case.x)
        with pytest.raises(KernelError):
            kernels.expert_pieces(case.spec, {SHARED: weights}, case.x, routing)


@pytest.mark.parametrize("kernels", [native, reference], ids=["native", "reference"])
def test_pieces_that_do_not_fit_are_refused(kernels: Kernels) -> None:
    case = experts_case(np.random.default_rng(4))
    routing, size = reference.route(case.spec.router, case.x), 2 * case.spec.routed.neuron.unit_bytes
    for held in ({6: case.data[:size]}, {0: case.data[: size - 1]}, {0: case.data[: 2 * size]}):
        with pytest.raises(KernelError):
            kernels.expert_pieces(case.spec, held, case.x, routing)


def part_of(spec: ExpertsSpec, pieces: tuple[ExpertPiece, ...], shared: bool) -> ExpertsSpec:
    run = replace(spec.routed.neuron, units=sum(piece.units for piece in pieces))
    return ExpertsSpec(replace(spec.routed, neuron=run), pieces, spec.shared if shared else None, spec.router)


def test_unchosen_experts_are_not_read() -> None:
    case = experts_case(np.random.default_rng(4), format="f32", tokens=1)
    routing = reference.route(case.spec.router, case.x)
    expected = native.experts(case.spec, case.data, case.x, routing)
    size = len(case.data) // 6
    spoilt = case.data.copy()
    for expert in set(range(6)) - set(routing.experts[0].tolist()):
        spoilt[expert * size : (expert + 1) * size] = 255  # NaN
    np.testing.assert_array_equal(native.experts(case.spec, spoilt, case.x, routing), expected)


def test_a_segment_without_the_chosen_experts_comes_to_nothing() -> None:
    case = experts_case(np.random.default_rng(5), tokens=2)
    routing = Routing(np.array([[1, 2], [2, 1]], np.int32), np.ones((2, 2), np.float32))
    size = case.spec.routed.neuron.unit_bytes * 2
    alone = part_of(case.spec, (ExpertPiece(0, 2),), shared=False)
    assert not native.experts(alone, case.data[:size], case.x, routing).any()
    nothing = part_of(case.spec, (), shared=False)
    assert not native.experts(nothing, case.data[:0], case.x, routing).any()
    none = Routing(routing.experts[:0], routing.weights[:0])
    assert native.experts(case.spec, case.data, case.x[:0], none).shape == (0, 64)


@over_isas(("format", "tokens", "shared"), FORMATS, [1, 2, 5, 16, 20], [0, 1])
def test_a_chain_has_the_bits_of_its_parts(
    isa: str, format: tuple[Format, Layout | None], tokens: int, shared: int
) -> None:
    """A chain computes a step of up to 16 tokens as one job, over all threads; a block alone takes three."""
    groups = Mixture(
        6, 2, 64, 32 * shared, scores="sigmoid", normalised=True, scale=1.5, groups=3, groups_used=2, group_best=1
    )
    for mixture in (None, groups):
        case = experts_case(
            np.random.default_rng(6), format=format[0], layout=format[1], tokens=tokens, shared=shared,
            gate=shared > 0, bias=mixture is None, hidden=96, mixture=mixture,
        )  # fmt: skip
        prepared = native.prepare(case.spec, case.x)
        apart = native.experts(case.spec, case.data, prepared, native.route(case.spec.router, prepared))
        chain = native.open_chain([ChainBlock(case.spec, case.data, Residual())] * 2)
        batch = replace(NO_TOKENS, positions=np.zeros(tokens, np.int32), sequence=np.zeros(tokens, np.int32))
        first = case.x + apart
        prepared = native.prepare(case.spec, first)
        again = native.experts(case.spec, case.data, prepared, native.route(case.spec.router, prepared))
        np.testing.assert_array_equal(chain.run(case.x, batch), first + again)


def test_a_token_has_the_same_bits_in_a_chain_step_of_several() -> None:
    case = experts_case(np.random.default_rng(8), format="q4", tokens=9, shared=1, gate=True, hidden=1024)
    chain = native.open_chain([ChainBlock(case.spec, case.data, Residual())])

    def run(x: F32) -> F32:
        count = np.zeros(len(x), np.int32)
        return chain.run(x, replace(NO_TOKENS, positions=count, sequence=count))

    together = run(case.x)  # 9 tokens of 1024 values: the threads share the norm; a thread alone computes one token's
    np.testing.assert_array_equal(together, np.concatenate([run(case.x[t : t + 1]) for t in range(9)]))


@pytest.mark.parametrize("wrong", ["experts", "shape", "data"])
def test_what_does_not_fit_is_refused(wrong: str) -> None:
    case = experts_case(np.random.default_rng(7), tokens=2)
    routing = native.route(case.spec.router, case.x)
    if wrong == "experts":
        routing = replace(routing, experts=routing.experts + np.int32(5))
    if wrong == "shape":
        routing = replace(routing, weights=routing.weights[:1])
    data = case.data[:-1] if wrong == "data" else case.data
    for kernels in (native, reference):
        with pytest.raises(KernelError):
            kernels.experts(case.spec, data, case.x, routing)


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    groups, each = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    open_groups = draw(st.integers(1, groups))
    return Mixture(
        experts=groups * each,
        used=draw(st.integers(1, open_groups * each)),
        width=32,
        scores=draw(st.sampled_from(["softmax", "sigmoid"])),
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        groups=groups,
        groups_used=open_groups,
        group_best=draw(st.integers(1, each)),
    )


@settings(max_examples=150, deadline=None)
@given(mixtures(), st.integers(0, 1 << 30), st.integers(1, 20), st.booleans(), st.booleans())
def test_routers_choose_alike(mixture: Mixture, seed: int, tokens: int, bias: bool, shared: bool) -> None:
    random = np.random.default_rng(seed)
    norm = norm_spec(random, "rms", 64)
    vectors = [normal(random, mixture.experts) if bias else None for _ in range(2)]
    router = RouterSpec(
        mixture,
        norm,
        normal(random, mixture.experts, 64),
        vectors[0],
        vectors[1],
        normal(random, 64) if shared else None,
    )
    x = normal(random, tokens, 64)
    expected, got = choose(router, x), native.route(router, native.prepare(ffn_case(random).spec, Normed(x)))
    np.testing.assert_array_equal(got.experts, expected.experts)
    np.testing.assert_allclose(got.weights, expected.weights, rtol=1e-4, atol=1e-7)
    if expected.shared is not None:
        assert got.shared is not None
        np.testing.assert_allclose(got.shared, expected.shared, rtol=1e-4)
