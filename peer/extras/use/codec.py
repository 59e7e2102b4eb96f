"""Text to tokens and back, token by token."""

from __future__ import annotations

import codecs
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from peer.data.text.tokenizing import BYTES_END, ByteTokenizer
from peer.errors import DataUnavailable, one_line
from peer.extras.export.tokenizer import TokenizerFiles
from peer.installed import needed
from peer.run_file.forms import ExampleForm

Message = Mapping[str, str]
"""``role`` and ``content`` of a message in a chat."""

HELD_MAX = 4
"""Tokens that are held back for the rest of a character, which has at most as many bytes."""

Decode = Callable[[int], str]
"""Returns the text that the next token completes, which may be empty."""


class Codec(Protocol):
    """The text form of a model's tokens."""

    end: int | None
    """The token that ends a document."""
    is_chat: bool
    """True if ``messages`` may be called."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special ones."""
        ...

    def messages(self, messages: Sequence[Message]) -> list[int]:
        """Return the tokens of a chat, up to where the model's answer begins."""
        ...

    def decoder(self, before: Sequence[int] = ()) -> tuple[Decode, Callable[[], str]]:
        """A function for one token after the other, and one that returns what is left.

        ``before``: the tokens that they continue.
        """
        ...

    def size_bytes(self, tokens: Sequence[int]) -> int:
        """Return the number of bytes of the text of tokens; one that ends a document has none."""
        ...


class ByteCodec:
    """Token i is the byte i."""

    end: int | None = BYTES_END
    is_chat = False

    def encode(self, text: str) -> list[int]:
        (tokens,) = ByteTokenizer().encode([text])
        numbers: list[int] = tokens.tolist()
        return numbers

    def messages(self, messages: Sequence[Message]) -> list[int]:
        raise NotImplementedError("bytes have no chat template")

    def decoder(self, before: Sequence[int] = ()) -> tuple[Decode, Callable[[], str]]:
        decoding = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A model may have more tokens than there are bytes.
        return (
            lambda token: decoding.decode(bytes([token])) if token < 256 else "\ufffd",
            lambda: decoding.decode(b"", final=True),
        )

    def size_bytes(self, tokens: Sequence[int]) -> int:
        return sum(token != self.end for token in tokens)


class FormCodec:
    """Puts what is said into the form in which a run's examples were, as in its training."""

    is_chat = True

    def __init__(self, codec: Codec, form: ExampleForm) -> None:
        self._codec = codec
        self._form = form
        self.end = codec.end

    def encode(self, text: str) -> list[int]:
        return self._codec.encode(text)

    def messages(self, messages: Sequence[Message]) -> list[int]:
        turns, opening = self._form.opening(messages)
        end = [] if self.end is None else [self.end]
        tokens = [token for turn in turns for token in (*self.encode(turn.text), *end)]
        return tokens + self.encode(opening)

    def decoder(self, before: Sequence[int] = ()) -> tuple[Decode, Callable[[], str]]:
        return self._codec.decoder(before)

    def size_bytes(self, tokens: Sequence[int]) -> int:
        return self._codec.size_bytes(tokens)


class TokenizerCodec:
    """A tokenizer of transformers."""

    def __init__(self, tokenizer: Any, end: int | None) -> None:
        self._tokenizer = tokenizer
        self.end = end
        self.is_chat = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def messages(self, messages: Sequence[Message]) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, tokenize=False
        )
        return self.encode(text)

    def decoder(self, before: Sequence[int] = ()) -> tuple[Decode, Callable[[], str]]:
        pieces = _Pieces(self._text, before[-HELD_MAX:])
        return pieces.add, pieces.rest

    def size_bytes(self, tokens: Sequence[int]) -> int:
        kept = [token for token in tokens if token != self.end]
        # Half characters at the ends would become replacement characters of three bytes.
        return len(self._text(kept).strip("\ufffd").encode())

    def _text(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class _Pieces:
    """Cuts the text of growing tokens into pieces that end between characters.

    The text of a token depends on the one before it (a leading space, the bytes of a character),
    so a piece is what new tokens add to the text of the last ones.
    """

    def __init__(self, text: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._text = text
        self._last = list(before)
        self._new: list[int] = []

    def add(self, token: int) -> str:
        self._new.append(token)
        piece = self._added()
        is_half = piece.endswith("\ufffd") and len(self._new) < HELD_MAX
        return "" if is_half else self._shown(piece)

    def rest(self) -> str:
        return self._shown(self._added()) if self._new else ""

    def _added(self) -> str:
        return self._text(self._last + self._new)[len(self._text(self._last)) :]

    def _shown(self, piece: str) -> str:
        self._last, self._new = self._new, []
        return piece


def codec_of(files: TokenizerFiles) -> Codec:
    """The codec of a run's tokenizer. Raises ``ExtraMissing`` or ``DataUnavailable``."""
    if files.is_bytes:
        return ByteCodec()
    with tempfile.TemporaryDirectory() as folder:
        for name, content in files.files.items():
            (Path(folder) / name).write_bytes(content)
        return codec_in(Path(folder), end=files.end)


def codec_in(folder: Path, *, end: int | None = None) -> Codec:
    """The codec of the tokenizer in a folder. Raises ``ExtraMissing`` or ``DataUnavailable``."""
    transformers = needed("transformers", f"the tokenizer in {folder}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # tokenizers raises bare exceptions
        why = one_line(error)
        raise DataUnavailable("tokenizer", f"{folder} has none that can be read: {why}") from error
    return TokenizerCodec(tokenizer, tokenizer.eos_token_id if end is None else end)
