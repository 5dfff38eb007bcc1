"""A check that no metadata of a GGUF file that would change the answers is ignored.

Only keys under the architecture's name, such as `llama.`, describe the model. `general.`, `tokenizer.` and keys that
converters add under other names do not.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tpi.errors import ModelError

_NAMED = 3  # keys that an error names

# Keys that do not change the computation.
_HARMLESS = (
    "vocab_size",  # the embedding's number of rows is used instead
    "tensor_data_layout",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_beta_fast",  # read only with YaRN
    "rope.scaling.yarn_beta_slow",
)
# Keys for features that are not supported, with the values that switch them off.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "use_parallel_residual": (False,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_weights_scale": (0, 1),
    "expert_weights_norm": (False,),
    "expert_gating_func": (0,),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "pooling_type": (0,),
}


class Keys(Mapping[str, Any]):
    """The metadata of one architecture, without its prefix. It records which keys have been read."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._architecture = architecture
        prefix = f"{architecture}."
        self._values = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
        self._read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def check(self) -> None:
        """Check that all keys have been read, do not change the computation, or have a neutral value.

        Raises:
            ModelError: if a key fails this check; the message names the first ones.
        """
        left = [key for key in self._values if key not in self._read and not self._harmless(key)]
        if left:
            names = ", ".join(f"{self._architecture}.{key}"[:80] for key in left[:_NAMED])
            more = f" and {len(left) - _NAMED} more" if len(left) > _NAMED else ""
            raise ModelError(
                f"its metadata has settings that are not supported: {names}{more}; without them its answers would be "
                "wrong, so this variant is refused"
            )

    def _harmless(self, key: str) -> bool:
        value = self._values[key]
        return key in _HARMLESS or (isinstance(value, int | float) and value in _NEUTRAL.get(key, ()))
