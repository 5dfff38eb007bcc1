"""Signatures of the C++ module (native/module.cpp)."""

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
KvArray = npt.NDArray[np.generic]
RunFields = tuple[bool, int, int, int, list[tuple[str, str, str]]]
NormFields = tuple[str, float, F32, F32 | None]
LatentFields = tuple[RunFields, NormFields, int, int, F32 | None]
QueryLatentFields = tuple[RunFields, RunFields, NormFields, F32 | None]
AttentionVectors = tuple[
    F32 | None, F32 | None, F32 | None, F32 | None, F32 | None, F32, F32 | None, F32 | None
]  # the biases of q, k and v, the norms of q and k, frequencies, sinks, the norm of v

PAGE_TOKENS: int  # tokens of a page
GROUP: int  # values that share a scale, of weights and activations
KV_GROUP: int  # values of a q8 or q4 key or value vector that share a scale
KV_RUN: int  # values of a q4 key or value vector whose codes lie in 8 bytes
KV_WORD: int  # the codes of a q8 or q4 key or value vector take whole words of so many bytes
STREAM_TOKENS: int  # steps of up to so many tokens read weights once; longer ones are matrix products
THREADS_MOST: int  # most threads of the pool
TILE_OUTPUTS: int  # outputs of a tile

def slices(threads: int) -> int: ...
def isa() -> str: ...
def available_isas() -> list[str]: ...
def use_isa(name: str) -> None: ...
def set_threads(count: int) -> None: ...
def threads() -> int: ...
def read(data: U8) -> None: ...
def norm(x: F32, norm: NormFields, out: F32) -> None: ...

class Prepared:
    def __init__(self) -> None: ...
    @property
    def shape(self) -> tuple[int, int]: ...
    def copy(self, out: F32) -> None: ...

Heads = tuple[F32, F32, F32, F32 | None]

class AttentionPlan:
    def __init__(
        self,
        query: RunFields,
        kv: RunFields,
        norm: NormFields,
        shape: tuple[int, int, int],
        kv_index: I32,
        vectors: AttentionVectors,
        numbers: tuple[float, float, float, int, float, bool, float, int, bool, bool],
        latent: LatentFields | None = None,
        query_latent: QueryLatentFields | None = None,
    ) -> None: ...
    def run(
        self,
        data: U8,
        x: F32 | Prepared,
        keys: KvArray,
        values: KvArray,
        positions: I32,
        sequence: I32,
        tables: I32,
        out: F32,
    ) -> None: ...
    def prepare(self, x: F32, normed: bool, into: Prepared) -> None: ...
    def project(self, data: U8, x: F32 | Prepared, positions: I32, projected: Heads) -> None: ...
    def attend(
        self, projected: Heads, keys: KvArray, values: KvArray, positions: I32, sequence: I32, tables: I32, out: F32
    ) -> None: ...
    def output(self, data: U8, mixed: F32, out: F32) -> None: ...

class RecurrentPlan:
    def run(
        self,
        data: U8,
        x: F32 | Prepared,
        states: F32,
        sequence: I32,
        slots: I32,
        out: F32,
        squares: F32 | None = None,
    ) -> None: ...
    def prepare(self, x: F32, normed: bool, into: Prepared) -> None: ...

class ConvPlan(RecurrentPlan):
    def __init__(self, values: RunFields, norm: NormFields, shape: tuple[int, int], weights: F32) -> None: ...

class DeltaPlan(RecurrentPlan):
    def __init__(
        self,
        values: RunFields,
        keys: RunFields,
        norm: NormFields,
        shape: tuple[int, int, int, int, int],
        key_index: I32,
        vectors: tuple[F32 | None, ...],
    ) -> None: ...

class MambaPlan(RecurrentPlan):
    def __init__(
        self,
        values: RunFields,
        keys: RunFields,
        norm: NormFields,
        shape: tuple[int, int, int, int, int],
        key_index: I32,
        vectors: tuple[F32 | None, ...],
        numbers: tuple[float, float, float],
    ) -> None: ...

class FfnPlan:
    def __init__(
        self,
        neuron: RunFields,
        norm: NormFields,
        activation: str,
        gated: bool,
        gate_bias: F32 | None,
        up_bias: F32 | None,
        threshold: float = 0.0,
        slope: float = 1.0,
    ) -> None: ...
    def run(self, data: U8, x: F32 | Prepared, active: I32 | None, out: F32) -> None: ...
    def prepare(self, x: F32, normed: bool, into: Prepared) -> None: ...

ResidualFields = tuple[F32 | None, NormFields | None, float]

RouterSettings = tuple[int, int, bool, bool, float, int, int, int]

class RouterPlan:
    def __init__(
        self,
        settings: RouterSettings,
        norm: NormFields,
        weight: F32,
        bias: F32 | None,
        choice: F32 | None,
        shared: F32 | None,
        factors: F32 | None,
    ) -> None: ...
    def route(self, x: F32 | Prepared, experts: I32, weights: F32, shared: F32 | None) -> None: ...

class ExpertsPlan:
    def __init__(
        self,
        router: RouterPlan,
        routed: FfnPlan,
        shared: FfnPlan | None,
        pieces: list[tuple[int, int]],
        down_bias: F32 | None,
        begins: list[bool],
    ) -> None: ...
    def prepare(self, x: F32, normed: bool, into: Prepared) -> None: ...
    def run(self, data: U8, x: F32 | Prepared, experts: I32, weights: F32, shared: F32 | None, out: F32) -> None: ...
    def run_pieces(
        self,
        data: list[tuple[int, U8]],
        beside: U8 | None,
        x: F32 | Prepared,
        experts: I32,
        weights: F32,
        shared: F32 | None,
        out: F32,
    ) -> None: ...

class Chain:
    def __init__(self, hidden: int) -> None: ...
    def attention(
        self, plan: AttentionPlan, data: U8, keys: KvArray | None, values: KvArray | None, residual: ResidualFields
    ) -> None: ...
    def recur(self, plan: RecurrentPlan, data: U8, states: F32 | None, residual: ResidualFields) -> None: ...
    def ffn(self, plan: FfnPlan, data: U8, residual: ResidualFields) -> None: ...
    def experts(self, plan: ExpertsPlan, data: U8, residual: ResidualFields) -> None: ...
    def run(
        self,
        x: F32,
        positions: I32,
        sequence: I32,
        tables: I32,
        slots: I32 | None,
        partial: F32,
        ended: I64 | None,
    ) -> None: ...

class RunPlan:
    def __init__(self, run: RunFields) -> None: ...
    def rows(self, data: U8, x: F32, out: F32) -> None: ...
    def gather(self, data: U8, rows: I32, out: F32) -> None: ...
    def decode(self, data: U8, part: str, out: F32) -> None: ...
