"""Text comes out of tokens whole, however its characters are cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peer.errors import DataUnavailable
from peer.extras.export.tokenizer import TokenizerFiles, bytes_tokenizer, tokenizer_of
from peer.extras.use.ready import ByteCodec, Codec, codec_in, codec_of, in_form
from peer.run_file.forms import form_of
from tests.peer.extras.export.exported_run import RUN

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

TEXT = "naïve 🐟 語\n\tdef f(x):  pass"


def of_transformers(folder: Path, *, template: str | None = None) -> Codec:
    """A byte-level tokenizer as transformers reads it, which does not know where characters end."""
    files = dict(bytes_tokenizer(32).files)
    if template is not None:
        config = json.loads(files["tokenizer_config.json"])
        config["chat_template"] = template
        files["tokenizer_config.json"] = json.dumps(config).encode()
    return codec_of(TokenizerFiles("own", files, 0))


def pieces(codec: Codec, tokens: list[int]) -> list[str]:
    decode, rest = codec.decoder()
    return [*(decode(token) for token in tokens), rest()]


@pytest.mark.parametrize("is_ours", [True, False])
def test_characters_are_shown_whole_and_as_soon_as_they_are(is_ours: bool, tmp_path: Path) -> None:
    codec = ByteCodec() if is_ours else of_transformers(tmp_path)
    tokens = codec.encode(TEXT)
    assert bytes(tokens) == TEXT.encode()
    shown = pieces(codec, tokens)
    assert "".join(shown) == TEXT
    assert [piece for piece in shown if piece] == list(TEXT)
    assert codec.size_bytes([*tokens, 0]) == len(TEXT.encode())


@pytest.mark.parametrize("is_ours", [True, False])
def test_bytes_that_are_no_text_do_not_hold_back_what_follows(
    is_ours: bool, tmp_path: Path
) -> None:
    codec = ByteCodec() if is_ours else of_transformers(tmp_path)
    shown = pieces(codec, [*b"a", 0xFF, 0xFE, 0xC3, 0x80, *b"bc", 0xF0, 0x9F])
    assert "".join(shown).startswith("a\ufffd\ufffd\u00c0bc")
    assert shown[-1].endswith("\ufffd")


def test_a_token_beyond_the_bytes_is_no_character() -> None:
    assert pieces(ByteCodec(), [65, 300, 66]) == ["A", "\ufffd", "B", ""]


def test_the_tokenizer_of_a_run_of_bytes_needs_no_other_package(tmp_path: Path) -> None:
    files = tokenizer_of(RUN, cache_dir=tmp_path, data_dir=tmp_path)
    assert files is not None
    assert isinstance(codec_of(files), ByteCodec)


def test_a_chat_is_written_with_the_template_of_the_tokenizer(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]"
    codec = of_transformers(tmp_path, template=template)
    chat = [{"role": "user", "content": "hé"}]
    assert bytes(codec.chat(chat) or ()).decode() == "[user] hé\n[assistant]"
    assert of_transformers(tmp_path).chat(chat) is None


def test_a_damaged_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataUnavailable, match="none that can be read"):
        codec_in(tmp_path)


def trained(folder: Path, kind: str) -> Codec:
    """A tokenizer with merges: of bytes as in GPT-2, or of words as in Llama."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    own = tokenizers.Tokenizer(models.BPE(unk_token=None, byte_fallback=kind == "words"))
    alphabet = pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else []
    if kind == "bytes":
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own.decoder = decoders.ByteLevel()
    else:
        own.pre_tokenizer = pre_tokenizers.Metaspace()
        own.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    own.train_from_iterator(["some words and other words, written again"] * 9, trainer)
    if kind == "words":  # characters that are not known are made of bytes
        plain = json.loads(own.to_str())
        known = plain["model"]["vocab"]
        known |= {f"<0x{byte:02X}>": len(known) + byte for byte in range(256)}
        own = tokenizers.Tokenizer.from_str(json.dumps(plain))
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>").save_pretrained(folder)
    return codec_in(folder)


@pytest.mark.parametrize("kind", ["bytes", "words"])
def test_pieces_of_a_tokenizer_with_merges_are_the_text(kind: str, tmp_path: Path) -> None:
    codec = trained(tmp_path, kind)
    text = "other words 🐟 written"
    tokens = codec.encode(text)
    assert codec.end is not None and codec.end not in tokens
    decode, rest = codec.decoder(tokens[:1])
    shown = [*(decode(token) for token in tokens[1:]), rest()]
    assert text.endswith("".join(shown)) and " words 🐟 written" in "".join(shown)
    assert all("\ufffd" not in piece for piece in shown)
    assert codec.size_bytes([*tokens, codec.end]) == len(text.encode())


def test_messages_to_a_model_have_the_form_of_its_training() -> None:
    chat = [
        {"role": "user", "content": "Hé?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": "Why?"},
    ]
    said = "User: Hé?\nAssistant: Yes.\0User: Why?\nAssistant: "
    tokens = in_form(ByteCodec(), form_of("chat", None, None), chat)
    assert bytes(tokens).decode() == said
    completion = form_of("completion", None, {"prompt": "Q{content}A", "answer": "{content}"})
    question = [{"role": "user", "content": "?"}]
    assert bytes(in_form(ByteCodec(), completion, question)) == b"Q?A"
