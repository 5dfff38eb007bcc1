"""The text that models are calibrated with, as token ids: English prose, code, and sentences in other languages."""

from pathlib import Path

from tokenizers import Tokenizer

MOST_TOKENS = 512
_TEXT = Path(__file__).with_name("text.txt")


def calibration_tokens(tokenizer: Path, vocab: int, context: int) -> list[int]:
    """Return the first token ids of the text: at most `MOST_TOKENS`, and at most `context`.

    `tokenizer` is the path of a tokenizer.json. Ids of tokens beyond the `vocab` of the model are left out.
    """
    ids = Tokenizer.from_file(str(tokenizer)).encode(_TEXT.read_text("utf-8")).ids
    return [token for token in ids if token < vocab][: min(MOST_TOKENS, context)]
