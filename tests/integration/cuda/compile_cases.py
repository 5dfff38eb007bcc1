"""Triton compiles every kernel for cards, though there is none: the interpreter accepts what the compiler does not.

For compute capabilities 7.5, the oldest that is supported, and 8.0; the programs that need most shared memory also for
later ones. Each is assembled, and must fit the shared memory of a block.
"""

import re
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from tpi.devices.cuda.device import OLDEST
from tpi.devices.cuda.products import INT8_FROM
from tpi.devices.cuda.programs import activate, attend, few, heads, many, norms, pages
from tpi.pack.groups import CODE_BYTES
from tpi.pack.layout import GROUP_BYTES

Constants = dict[str, Any]
POINTERS = {"data": "u8", "codes": "i8", "rest": "i8", "index": "i32", "positions": "i32", "sequence": "i32",
            "tables": "i32", "blocks": "i32", "kv_index": "i32"}  # fmt: skip
FLOATS = {"x", "out", "scales", "weight", "bias", "gate", "up", "gate_bias", "up_bias", "inv_freq", "queries", "mixed",
          "largest", "heads"}  # fmt: skip
SCALARS = {"eps", "rope_scale", "scale", "softcap", "threshold"}
CACHES = {"cache", "keys", "values"}
STORED = {"q8": "i8", "q4": "u8", "f16": "fp16", "f32": "fp32"}
WHOLE = {"offset", "unit", "outputs", "vectors", "length", "hidden", "head_dim"}  # multiples of 16, in most models


def quantised(format: Any, **others: Any) -> Constants:
    return {"FORMAT": format, "BYTES": GROUP_BYTES[format], "CODES": CODE_BYTES[format], **others}


def untiled(constants: Constants) -> Constants:
    """Return the constants of a kernel that has no choice of layout."""
    return {name: value for name, value in constants.items() if name != "TILED"}


GROUPED = [quantised(format, TILED=tiled, INDEXED=False) for format in ("q8", "q4", "q4s") for tiled in (True, False)]
RECORDS = [
    *(quantised(format, INDEXED=True) for format in ("q8", "q4", "q4s")),
    *({"FORMAT": format, "BYTES": 0, "CODES": 1, "INDEXED": True} for format in ("f32", "bf16")),
]
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227}  # KiB that a block may have
CASES: list[tuple[Any, Constants]] = [
    *((few.few_words, {**untiled(each), "TOKENS": 1, "OUTPUTS": 8, "GROUPS": 32}) for each in GROUPED[::2]),
    *((few.few_grouped, {**each, "TOKENS": 1, "OUTPUTS": 8, "GROUPS": 16}) for each in GROUPED[1::2]),
    *((few.few_grouped, {**quantised(each, TILED=True, INDEXED=False), "TOKENS": 1, "OUTPUTS": 8, "GROUPS": 16})
      for each in ("q6", "q5", "q2", "iq4", "iq2", "mxfp4", "nvfp4")),
    *((many.many_grouped, {**quantised(each, TILED=True, INDEXED=False), "TOKENS": 32, "OUTPUTS": 64, "INT8": True})
      for each in ("q6", "iq4")),
    (few.few_words, {**untiled(GROUPED[2]), "TOKENS": 16, "OUTPUTS": 8, "GROUPS": 16}),
    *((many.many_grouped, {**each, "TOKENS": 32, "OUTPUTS": 64}) for each in GROUPED[::2]),
    *(
        (few.few_rows, {"FORMAT": format, "INDEXED": True, "TOKENS": 4, "OUTPUTS": 4, "GROUPS": 4})
        for format in ("f32", "bf16")
    ),
    *((few.few_columns, {**each, "TOKENS": 1, "VECTORS": 16, "GROUPS": 4}) for each in RECORDS),
    *((many.many_plain, {**each, "TOKENS": 32, "OUTPUTS": 64, "COLUMNS": True}) for each in RECORDS[::2]),
    (many.many_plain, {**RECORDS[4], "TOKENS": 32, "OUTPUTS": 64, "COLUMNS": False}),
    *((many.decode, {**each, "VECTORS": 8}) for each in GROUPED[::2]),
    (norms.norm, {"LAYER": True, "BIASED": True, "SIZE": 4096}),
    *((norms.round_groups, {"GROUPS": 32, "REST": rest}) for rest in (True, False)),
    *(
        (activate.activate, {"KIND": kind, "GATED": True, "GATE_BIAS": True, "UP_BIAS": True, "INDEXED": True,
                             "SIZE": 1024})
        for kind in ("relu", "relu2", "fatrelu", "drelu", "silu", "gelu", "gelu_tanh")
    ),
    (heads.finish_heads, {"BIASED": True, "NORMED": True, "ROTATED": True, "SIZE": 128}),
    (pages.spread, {"GROUPS": 4}),
    *((pages.append, {"FORMAT": format, "GROUPS": 4}) for format in STORED),
    *((attend.attend, {"FORMAT": format, "CAPPED": True, "SIZE": 128}) for format in ("q8", "q4", "f16")),
    *(
        (attend.attend_many, {"FORMAT": format, "CAPPED": True, "SIZE": 128, "TOKENS": 16})
        for format in ("q8", "q4", "f32")
    ),
    (attend.merge, {"SIZE": 128, "SPLITS": 16}),
]  # fmt: skip
SIZES: list[tuple[Any, Constants]] = [
    *((few.few_words, {**untiled(GROUPED[at]), "INDEXED": True, "TOKENS": tokens, "OUTPUTS": 8, "GROUPS": groups})
      for at, tokens, groups in ((0, 2, 32), (2, 4, 16), (4, 8, 16))),
    (few.few_grouped, {**GROUPED[3], "INDEXED": True, "TOKENS": 8, "OUTPUTS": 8, "GROUPS": 2}),
    *((few.few_rows, {"FORMAT": "f32", "INDEXED": False, "TOKENS": tokens, "OUTPUTS": 4, "GROUPS": groups})
      for tokens, groups in ((1, 16), (16, 2))),
    *((few.few_columns, {**each, "TOKENS": 16, "VECTORS": 2, "GROUPS": 4}) for each in RECORDS[1:4]),
    (many.many_grouped, {**GROUPED[3], "INDEXED": True, "TOKENS": 32, "OUTPUTS": 64}),
    *((many.many_plain, {**RECORDS[3], "INDEXED": False, "TOKENS": 32, "OUTPUTS": 64, "COLUMNS": columns})
      for columns in (True, False)),
    (many.decode, {**RECORDS[3], "TILED": False, "VECTORS": 8}),
    (norms.norm, {"LAYER": False, "BIASED": False, "SIZE": 16384}),
    (heads.finish_heads, {"BIASED": False, "NORMED": False, "ROTATED": False, "SIZE": 256}),
    (pages.append, {"FORMAT": "q4", "GROUPS": 8}),
    (attend.attend, {"FORMAT": "f32", "CAPPED": False, "SIZE": 256}),
    *((attend.attend_many, {"FORMAT": format, "CAPPED": False, "SIZE": size, "TOKENS": 16})
      for format, size in (("f16", 16), ("f32", 256), ("q4", 256))),
    (attend.merge, {"SIZE": 256, "SPLITS": 512}),
]  # fmt: skip
"""Other sizes and forms, the largest among them."""


def compiled(kernel: Any, constants: Constants, capability: int, ones: bool = False) -> str:
    """Return the PTX that the card would run, once it is assembled and fits the shared memory of the card.

    `ones`: for numbers that are 1, which Triton takes for constants.
    """
    if "INT8" in kernel.arg_names:
        constants = {**constants, "INT8": divmod(capability, 10) >= INT8_FROM}
    if ones:
        numbers = {name for name in kernel.arg_names if name not in {*constants, *POINTERS, *FLOATS, *SCALARS, *CACHES}}
        constants = {**constants, **dict.fromkeys(numbers, 1)}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in CACHES and "FORMAT" in constants:
            signature[name] = "*" + STORED[constants["FORMAT"]]
        elif name in POINTERS or name in FLOATS:
            signature[name] = "*" + POINTERS.get(name, "fp32")
        else:
            signature[name] = "fp32" if name in SCALARS else "i32"
    wide = {name for name, kind in signature.items() if kind[0] == "*" or (name in WHOLE and kind == "i32")}
    aligned = [at for at, name in enumerate(kernel.arg_names) if name in wide]
    source = ASTSource(kernel, signature, constants, {(at,): [["tt.divisibility", 16]] for at in aligned})
    found = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": True})
    ptx: str = found.asm["ptx"]
    assert ".visible .entry" in ptx
    assert f".target sm_{capability}" in ptx
    assert found.asm["cubin"]
    assert found.metadata.shared <= SHARED[capability] << 10
    return ptx


def name_of(value: Any) -> str | None:
    """Return the name of a kernel as the id of a test, and None for other values."""
    return getattr(value, "__name__", None)


def test_the_oldest_cards_are_among_them() -> None:
    assert divmod(min(SHARED), 10) == OLDEST


@pytest.mark.parametrize(("kernel", "constants"), CASES, ids=name_of)
def test_it_compiles_for_the_oldest_cards(kernel: Any, constants: Constants) -> None:
    compiled(kernel, constants, 75)


@pytest.mark.parametrize(
    ("kernel", "constants"), [case for case in CASES if "INT8" in case[0].arg_names][::2], ids=name_of
)
def test_it_compiles_for_cards_that_multiply_int8(kernel: Any, constants: Constants) -> None:
    compiled(kernel, constants, 80)


@pytest.mark.parametrize(("kernel", "constants"), SIZES, ids=name_of)
def test_it_compiles_in_other_sizes_for_the_oldest_cards(kernel: Any, constants: Constants) -> None:
    compiled(kernel, constants, 75)


@pytest.mark.parametrize("capability", [86, 89, 90])
def test_the_largest_fit_later_cards(capability: int) -> None:
    if capability != 89:  # has the shared memory of 86
        compiled(attend.attend_many, {"FORMAT": "f32", "CAPPED": True, "SIZE": 256, "TOKENS": 16}, capability)
    compiled(many.many_grouped, {**GROUPED[0], "TOKENS": 32, "OUTPUTS": 64}, capability)


@pytest.mark.parametrize("kernel", dict(CASES), ids=lambda kernel: kernel.__name__)
def test_it_compiles_for_one_of_everything(kernel: Any) -> None:
    compiled(kernel, dict(CASES)[kernel], 80, ones=True)


@pytest.mark.parametrize("constants", [each for each in GROUPED if each["FORMAT"] != "q8"])
def test_few_tokens_read_weights_in_words_not_in_bytes(constants: Constants) -> None:
    tiled, sizes = constants["TILED"], {"TOKENS": 1, "OUTPUTS": 8}
    kernel, of = (few.few_words, untiled(constants)) if tiled else (few.few_grouped, constants)
    ptx = compiled(kernel, {**of, **sizes, "GROUPS": 32 if tiled else 16}, 80)
    assert not re.search(r"ld\.global[\w.]*\.[bsu]8\b", ptx)


@pytest.mark.parametrize(("capability", "instruction"), [(80, "mma.sync.aligned.m16n8k32"), (90, "mma")])
def test_many_tokens_are_multiplied_by_tensor_cores(capability: int, instruction: str) -> None:
    ptx = compiled(many.many_grouped, {**GROUPED[2], "TOKENS": 32, "OUTPUTS": 64}, capability)
    assert instruction in ptx
    assert "s32.s8.s8" in ptx


def test_every_kernel_is_among_the_cases() -> None:
    modules = (few, many, norms, activate, heads, pages, attend)
    kernels = {each for module in modules for each in vars(module).values() if isinstance(each, triton.JITFunction)}
    launched = {each for each in kernels if "tl.program_id(" in each.src}
    assert len(launched) > 10
    assert launched == {kernel for kernel, _ in CASES}
