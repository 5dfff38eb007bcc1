"""The quantisation of a repository that is used: the largest whose pack fits into the machines' memory."""

import pytest

from tpi.errors import ModelError
from tpi.pack.library.hubfiles import HubFiles, HubModel
from tpi.pack.library.quantisations import HouseMemory, best_quantisation

GB = 10**9
SIZES = {  # an 8B model
    "m-BF16.gguf": 16 * GB, "m-Q8_0.gguf": 85 * GB // 10, "m-Q6_K.gguf": 66 * GB // 10, "m-Q5_K_M.gguf": 57 * GB // 10,
    "m-UD-Q4_K_XL.gguf": 51 * GB // 10, "m-Q4_K_M.gguf": 49 * GB // 10, "m-IQ4_XS.gguf": 44 * GB // 10,
    "m-Q2_K.gguf": 32 * GB // 10, "m-IQ1_S.gguf": 21 * GB // 10,
}  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "chosen"),
    [
        (64.0, "m-Q8_0.gguf"), (10.0, "m-Q8_0.gguf"), (9.7, "m-Q6_K.gguf"), (7.0, "m-UD-Q4_K_XL.gguf"),
        (6.2, "m-Q4_K_M.gguf"), (6.0, "m-IQ4_XS.gguf"),
    ],
)  # fmt: skip
def test_the_largest_that_fits_is_taken(memory: float, chosen: str) -> None:
    best, why = best_quantisation(SIZES, lambda: HouseMemory(memory * GB, 2))
    assert (best, why) == (chosen, f"the best of 9 that fits the {memory:.1f} GB free on 2 machines")


def test_if_nothing_fits_the_usual_one_is_read_from_disk() -> None:
    best, why = best_quantisation(SIZES, lambda: HouseMemory(2 * GB))
    assert best == "m-Q4_K_M.gguf"
    assert why == "one of 9, though none fits the 2.0 GB free on this machine, so weights are read from disk"


def test_memory_is_not_asked_for_without_a_choice_or_sizes() -> None:
    def unasked() -> HouseMemory:
        raise AssertionError

    assert best_quantisation({"a-BF16.gguf": GB}, unasked) == ("a-BF16.gguf", "")
    assert best_quantisation(dict.fromkeys(SIZES, 0), unasked) == ("m-Q4_K_M.gguf", "one of 9")
    assert best_quantisation({"b-F16.gguf": GB, "a-BF16.gguf": GB}, unasked) == ("a-BF16.gguf", "one of 2")


def test_a_split_model_counts_all_its_parts() -> None:
    parts = {f"Q8_0/m-Q8_0-0000{part}-of-00002.gguf": 5 * GB for part in (1, 2)}
    model = HubModel("o/m")
    sizes = parts | {"m-Q4_K_M.gguf": 5 * GB}
    assert HubFiles.choose(model, sizes, lambda: HouseMemory(8 * GB)).gguf == ("m-Q4_K_M.gguf",)
    large = HubFiles.choose(model, sizes, lambda: HouseMemory(12 * GB))
    assert large.gguf == tuple(parts)
    assert "using Q8_0/m-Q8_0-00001-of-00002.gguf (10.0 GB), the best of 2" in large.note


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("https://huggingface.co/o/m/tree/main", ("o/m", "main", "")),
        ("https://huggingface.co/o/m/", ("o/m", "main", "")),
        ("https://huggingface.co/o/m/blob/v1/sub/m-Q8_0.gguf", ("o/m", "v1", "sub/m-Q8_0.gguf")),
        ("hf.co/o/m/resolve/main/m-Q8_0.gguf?download=true", ("o/m", "main", "m-Q8_0.gguf")),
        ("https://huggingface.co/o/m/tree/main/BF16", ("o/m", "main", "BF16")),
        ("https://huggingface.co/o/m/blob/main/model.safetensors", ("o/m", "main", "")),
    ],
)
def test_addresses_of_pages_name_models(spec: str, parts: tuple[str, str, str]) -> None:
    model = HubModel.parse(spec)
    assert model
    assert (model.repository, model.revision, model.choice) == parts


def test_other_pages_of_the_site_are_no_models() -> None:
    for spec in ("https://huggingface.co/o/m/discussions/1", "https://huggingface.co/o", "https://example.com/o/m"):
        assert HubModel.parse(spec) is None
    with pytest.raises(ModelError, match="no GGUF model 'none'"):
        HubFiles.choose(HubModel("o/m", choice="none"), SIZES)
