"""The tokenizer of the trained model (byte-level BPE), and the text as token ids."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

U16 = npt.NDArray[np.uint16]

VOCAB = 1024
BEGIN, END = "<s>", "</s>"
BEGIN_ID, END_ID = 0, 1


def train_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """Train a BPE of `VOCAB` tokens, of which the first two are `BEGIN` and `END`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[BEGIN, END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, documents: Iterable[str]) -> U16:
    """Encode all documents one after the other, each between `BEGIN_ID` and `END_ID`, as `[tokens]` uint16."""

    def pieces() -> Iterator[U16]:
        for text in documents:
            yield np.array([BEGIN_ID, *tokenizer.encode(text).ids, END_ID], np.uint16)

    return np.concatenate(list(pieces()))


def prepared(folder: Path, documents: Iterable[str], held: Iterable[str]) -> tuple[Tokenizer, U16, U16]:
    """Load the tokenizer, training tokens and held-out tokens from `folder`; make them first if they do not exist."""
    names = ("tokenizer.json", "train.npy", "held.npy")
    if not all((folder / name).exists() for name in names):
        folder.mkdir(parents=True, exist_ok=True)
        texts = list(documents)
        tokenizer = train_tokenizer(texts)
        np.save(folder / "held.npy", encode(tokenizer, held))
        np.save(folder / "train.npy", encode(tokenizer, texts))
        tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_file(str(folder / names[0])), np.load(folder / names[1]), np.load(folder / names[2])
