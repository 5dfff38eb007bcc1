"""The table of the families of this folder, and their tensor names."""

from tpi.families.afternorm import defaults, gguf, settings
from tpi.families.base import Family
from tpi.families.expertnames import GGUF_OLMOE_ATTENTION, OLMOE_ATTENTION
from tpi.families.names import (
    GEMMA2_FFN,
    GEMMA3_ATTENTION,
    GGUF_GEMMA_ATTENTION,
    GGUF_GEMMA_FFN,
    GGUF_HEAD_NORMS,
)
from tpi.families.sharednames import gguf_names, llama_names


def _without_norm(templates: dict[str, str]) -> dict[str, str]:
    return {name: text for name, text in templates.items() if name != "norm"}


FFN = _without_norm(GEMMA2_FFN)
OLMO_ATTENTION = _without_norm(OLMOE_ATTENTION) | {"post_norm": GEMMA3_ATTENTION["post_norm"]}
EXAONE_ATTENTION = {name: text for name, text in _without_norm(GEMMA3_ATTENTION).items() if not name.endswith(".bias")}
GGUF_FFN = _without_norm(GGUF_GEMMA_FFN)
GGUF_OLMO_ATTENTION = _without_norm(GGUF_OLMOE_ATTENTION) | {"post_norm": GGUF_GEMMA_ATTENTION["post_norm"]}
GGUF_EXAONE_ATTENTION = _without_norm(GGUF_GEMMA_ATTENTION | GGUF_HEAD_NORMS)

AFTERNORM = (
    Family(
        "olmo2",
        architectures=("Olmo2ForCausalLM",),
        gguf="olmo2",
        names=llama_names(OLMO_ATTENTION, FFN),
        gguf_names=gguf_names(GGUF_OLMO_ATTENTION, GGUF_FFN, factors=()),
        defaults=defaults.OLMO2,
        settings=settings.olmo2,
        gguf_settings=gguf.olmo2,
    ),
    Family(
        "olmo3",
        architectures=("Olmo3ForCausalLM",),
        names=llama_names(OLMO_ATTENTION, FFN),
        defaults=defaults.OLMO3,
        settings=settings.olmo3,
    ),
    Family(
        "exaone4",
        architectures=("Exaone4ForCausalLM",),
        gguf="exaone4",
        names=llama_names(EXAONE_ATTENTION, FFN),
        gguf_names=gguf_names(GGUF_EXAONE_ATTENTION, GGUF_FFN),
        defaults=defaults.EXAONE4,
        settings=settings.exaone4,
        gguf_settings=gguf.exaone4,
    ),
)
