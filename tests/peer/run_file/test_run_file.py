from __future__ import annotations

import datetime
import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from peer.errors import RunFileError
from peer.run_file.contradictions import remarks
from peer.run_file.declaring import TomlLines
from peer.run_file.presets import preset, starting
from peer.run_file.reading import (
    RUN_FILE_MAX_BYTES,
    TEXT_MAX_BYTES,
    from_canonical,
    parse,
    parse_whole,
)
from peer.run_file.sections import (
    AdamwInner,
    CustomData,
    CustomInner,
    CustomModel,
    End,
    FilesData,
    FileSource,
    GptModel,
    HfData,
    HfModel,
    MuonInner,
    RunFile,
    Schedule,
    SgdInner,
    TextData,
)
from peer.run_file.writing import differences, to_toml

GOLDEN_ID = "3959f87c8876729a0c9ad79ddad687cf5bfefffc30347e26c77569e173c154b5"
PEER = "12D3KooWGBfKqTqgyD5c5uN3MQmLxKYzvm9mCc9ZJdNxVjBrfJm8"


def only_fault(text: str) -> str:
    with pytest.raises(RunFileError) as caught:
        parse(text, source="a.toml")
    assert len(caught.value.faults) == 1, [str(fault) for fault in caught.value.faults]
    return str(caught.value)


def test_the_template_differs_from_the_defaults_where_something_else_trains_better() -> None:
    written = parse(to_toml(starting("my-run")))
    assert differences(RunFile(), written) == [
        'inner.optimizer was "adamw" and is "muon"',
        "inner.learning_rate was 0.001 and is 0.012",
        "outer.steps_per_cycle was 24 and is 8",
        "outer.overlap_steps was 6 and is 2",
        'outer.merge was "mean" and is "centered_clip"',
        'outer.late_work was "whole" and is "per_cycle"',
        'outer.smaller_codecs was [] and is ["int2/int4", "int2"]',
        "outer.steps_per_cycle_max was unset and is 120",
        "evaluation.every_versions was 1 and is 3",
        "inner.momentum was unset and is 0.95",
    ]


def test_comments_name_the_default_of_each_setting_that_has_another_value() -> None:
    text = " ".join(line.removeprefix("# ") for line in to_toml(starting("my-run")).splitlines())
    assert "How one peer trains. One of (default: adamw):" in text
    assert "(a number above 0 to 100; default: 0.001) learning_rate = 0.012" in text
    assert "(a whole number from 1 to 100000; default: unset) steps_per_cycle_max = 120" in text
    assert text.count("default: ") == 9
    assert "; default: 4) layers = 12" in " ".join(
        line.removeprefix("# ") for line in to_toml(preset("124m")).splitlines()
    )


def test_the_template_shows_every_setting_by_name() -> None:
    text = to_toml(starting("my-run"))
    for field in msgspec.structs.fields(RunFile):
        value = getattr(starting("a-run"), field.name)
        names = (
            [inner.name for inner in msgspec.structs.fields(value)]
            if isinstance(value, msgspec.Struct)
            else [field.name]
        )
        for name in names:
            assert f"\n{name} = " in text or f"\n# {name} = ..." in text


def test_no_line_of_the_template_is_over_a_hundred_characters() -> None:
    assert max(len(line) for line in to_toml(starting("my-run")).splitlines()) <= 100


@pytest.mark.parametrize("short", [True, False])
def test_a_run_file_that_was_cut_off_is_refused(short: bool) -> None:
    """An empty file was a run, and `shoal start` founded it; so was every beginning of a file."""
    text = to_toml(starting("a-run"), short=short)
    assert parse_whole(text) == starting("a-run")
    ends = [at for at, character in enumerate(text) if character == "\n"][:-1]
    for at in [0, *ends[::7], ends[-1]]:
        with pytest.raises(RunFileError, match=r"end\.tokens, which every run file sets"):
            parse_whole(text[:at])
    with pytest.raises(RunFileError) as caught:
        parse_whole("", source="a.toml")
    assert str(caught.value) == (
        "a.toml: it does not set name, model.recipe, data.recipe and end.tokens, which every run "
        "file sets: it is empty or was cut off; `shoal run new` writes a whole one"
    )


def test_an_empty_text_has_the_defaults() -> None:
    assert parse("") == RunFile()


def test_the_id_of_the_defaults_never_changes() -> None:
    """Frozen with schema 1: a failing golden id means that every existing run lost its name."""
    assert RunFile().run_id == GOLDEN_ID


@pytest.mark.parametrize(
    ("text", "run_id"),
    [
        (
            "[model]\nlayers = 5\nmlp = 'gelu'\n[inner]\noptimizer = 'sgd'",
            "c544cf52d9745d6b33084365acb8a9a42dd052e25c92c7c7776f6ced761eba32",
        ),
        (
            "[model]\nrecipe = 'hf'\nconfig = { model_type = 'llama' }",
            "f823a11412cef5a91cf4f207193788ab368937d1acd89570aee145c9deee4137",
        ),
    ],
)
def test_ids_from_before_later_settings_stay(text: str, run_id: str) -> None:
    assert parse(text).run_id == run_id


ADDRESSES = ("homepage", "contact", "discussion")


@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses_of_a_run_are_part_of_its_id_where_it_has_them(name: str) -> None:
    assert parse(f'{name} = ""').run_id == GOLDEN_ID
    run = parse(f'{name} = "https://example.org/a?b=c#d"')
    assert run.run_id != GOLDEN_ID
    assert from_canonical(run.canonical(), run.run_id) == run
    assert parse(to_toml(run)) == run


def test_a_contact_may_be_a_mail_address() -> None:
    assert parse('contact = "anna@example.org"').contact == "anna@example.org"


def test_a_later_setting_is_in_the_canonical_form_only_if_it_is_not_the_default() -> None:
    assert parse("[model]\nqk_norm = false\nlogit_soft_cap = 'off'").run_id == GOLDEN_ID
    run = parse("[model]\nkv_heads = 2")
    assert json.loads(run.canonical())["model"]["kv_heads"] == 2
    assert run.run_id != GOLDEN_ID
    explicit = RunFile().canonical().replace(b'"layers":4', b'"kv_heads":null,"layers":4')
    assert "it is not in canonical form" in reject(explicit)


def test_the_canonical_form_is_sorted_compact_json_with_every_setting() -> None:
    text = RunFile().canonical().decode()
    plain = json.loads(text)
    assert text == json.dumps(plain, sort_keys=True, separators=(",", ":"))
    assert plain["schema"] == 1
    assert plain["outer"]["codec"] == "int4"
    assert plain["model"]["mlp_width"] is None
    assert "seeds" not in plain


def test_the_spelling_of_a_file_does_not_change_its_id() -> None:
    spelled = "# a comment\nouter = { momentum = 0, learning_rate = 1 }\n\"name\" = 'my-run'\n"
    assert parse(spelled).run_id == RunFile().run_id


def test_seeds_do_not_change_the_id_and_every_other_setting_does() -> None:
    seed = f"/ip4/203.0.113.7/tcp/7700/p2p/{PEER}"
    assert parse(f'seeds = ["{seed}"]').run_id == RunFile().run_id
    assert parse("random_seed = 1").run_id != RunFile().run_id
    assert parse("[outer]\ncodec = 'f32'").run_id != RunFile().run_id
    assert parse("[model]\nlayers = 5").run_id != RunFile().run_id
    assert parse("[outer]\ncodec_up = 'int2'").run_id != RunFile().run_id


def test_updates_of_embeddings_are_fed_back_by_their_own_codec() -> None:
    text = "[outer]\ncodec = 'int4'\nembedding_codecs = "
    assert parse(f"{text}'int2/int4'").outer.fed_back == {"int2"}
    assert parse(f"{text}'int8'").outer.fed_back == set()
    assert parse(f"{text}'int8'").outer.embedding_pair == ("int8", "int8")
    assert RunFile().outer.embedding_pair is None


def test_one_codec_is_a_short_form_for_both_ways() -> None:
    assert RunFile().outer.codecs == ("int4", "int4")
    assert parse("[outer]\ncodec = 'f16'\ncodec_up = 'int2'").outer.codecs == ("int2", "f16")
    assert parse("[outer]\ncodec_down = 'int2'").outer.codecs == ("int4", "int2")


def test_the_loss_of_int2_is_fed_back_unless_the_file_says_otherwise() -> None:
    def fed_back(text: str) -> set[str]:
        return set(parse(f"[outer]\n{text}").outer.fed_back)

    assert fed_back("") == set()
    assert fed_back("codec_up = 'int2'") == {"int2"}
    assert fed_back("smaller_codecs = ['int2/int4']") == {"int2"}
    assert fed_back("codec = 'int2'\nfeedback = 'off'") == set()
    assert fed_back("codec_down = 'int2'") == {"int2"}
    assert fed_back("feedback = 'on'\nsmaller_codecs = ['int2']") == {"int4", "int2"}
    assert fed_back("feedback = 'on'\ncodec_down = 'int8'") == {"int4", "int8"}
    assert fed_back("feedback = 'uploads'") == {"int4"}


def test_the_loss_of_merged_slices_is_fed_back_unless_the_optimizer_is_muon() -> None:
    def fed_back(feedback: str, *, muon: bool) -> bool:
        return parse(f"[outer]\nfeedback = '{feedback}'").outer.feeds_back_merged(muon=muon)

    assert fed_back("auto", muon=False) and not fed_back("auto", muon=True)
    assert fed_back("on", muon=True)
    assert not fed_back("uploads", muon=False)


def test_smaller_rounds_are_accepted() -> None:
    assert parse("[outer]\nsmaller_codecs = ['int2/int4', 'int2']\nsteps_per_cycle_max = 120")


def test_equal_moments_with_different_offsets_have_one_id() -> None:
    here = parse("[end]\ndate = 2027-03-31T14:00:00+02:00")
    there = parse("[end]\ndate = 2027-03-31T12:00:00Z")
    assert here.run_id == there.run_id
    assert here.end.date == datetime.datetime(2027, 3, 31, 12, tzinfo=datetime.UTC)


def test_a_usual_configuration_of_transformers_is_accepted() -> None:
    config = (
        "{ model_type = 'llama', hidden_act = 'silu', intermediate_size = 11008, "
        "num_hidden_layers = 4096, max_position_embeddings = 10485760, layer_norm_eps = 1e-6, "
        "attn_implementation = 'sdpa', expert_hidden_size = 65536 }"
    )
    assert parse(f"[model]\nrecipe = 'hf'\nconfig = {config}").model


def test_a_clip_norm_must_be_above_zero_or_off() -> None:
    assert parse("[inner]\nclip_norm = 'off'").inner.clip_norm == "off"


def test_limits_are_inclusive_where_they_say_so() -> None:
    assert parse("[outer]\nfragments = 1").outer.fragments == 1
    assert parse("[outer]\nfragments = 4096").outer.fragments == 4096
    assert parse("[data]\nheld_out = 0.5").data.held_out == 0.5


@pytest.mark.parametrize(
    ("text", "quorum"),
    [("2", 2), ("0.75", 0.75), ("1.0", 1.0), ("'all'", "all"), ("'majority'", "majority")],
)
def test_a_quorum_is_a_number_a_fraction_or_a_word(text: str, quorum: float | str) -> None:
    run = parse(f"[rounds]\nquorum = {text}")
    assert run.rounds.quorum == quorum
    assert type(run.rounds.quorum) is type(quorum)
    assert from_canonical(run.canonical(), run.run_id).rounds.quorum == quorum


def test_no_overlap_means_synchronous() -> None:
    assert parse("[outer]\noverlap_steps = 0").synchronous
    assert not RunFile().synchronous


def test_the_decay_ends_with_the_token_budget_by_default() -> None:
    assert parse("[end]\ntokens = 5_000_000").decay_tokens == 5_000_000
    assert parse("[schedule]\ndecay_tokens = 7_000_000").decay_tokens == 7_000_000
    assert parse("[schedule]\nshape = 'constant'").decay_tokens is None


# --- the canonical form, as strangers serve it ------------------------------------------------

RUNS = [
    RunFile(),
    RunFile(name="x", seeds=[f"/dns4/seed.example.org/tcp/7700/p2p/{PEER}"], description='ünï "q"'),
    RunFile(
        model=HfModel(config={"model_type": "llama", "rope": {"type": "x", "f": [1.0, 2]}}),
        data=HfData(dataset="a/b", revision="ab" * 20),
        inner=SgdInner(nesterov=True),
    ),
    RunFile(model=CustomModel(layout_hash="ab" * 32), data=CustomData(), inner=CustomInner()),
    RunFile(
        data=FilesData(
            sources=[
                FileSource(files=["a/*.txt", f"https://example.org/x.bin#sha256={'ab' * 32}"]),
                FileSource(files=['b"'], weight=0.5, text_field="ü", dtype="uint32"),
            ],
            tokenizer=f"t.json#sha256={'ab' * 32}",
            end_token="</s>",
        ),
    ),
    RunFile(
        data=TextData(files=["a/*.txt", "b\\u.md"]),
        end=End(date=datetime.datetime(2030, 1, 1, tzinfo=datetime.UTC), tokens="unlimited"),
        schedule=Schedule(decay_tokens=9_000_000),
        inner=AdamwInner(clip_norm="off"),
        model=GptModel(mlp="gelu", mlp_width=512),
    ),
    RunFile(
        model=GptModel(kv_heads=2, qk_norm=True, logit_soft_cap=30.0), inner=MuonInner(momentum=0.9)
    ),
]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_survives_its_canonical_form(run: RunFile) -> None:
    read = from_canonical(run.canonical(), run.run_id)
    assert read == msgspec.structs.replace(run, seeds=[])
    assert read.run_id == run.run_id


@pytest.mark.parametrize("run", RUNS)
def test_a_run_survives_being_written_as_toml(run: RunFile) -> None:
    assert parse(to_toml(run)) == run


def reject(data: bytes, run_id: str | None = None) -> str:
    with pytest.raises(RunFileError) as caught:
        from_canonical(data, blake3(data).hexdigest() if run_id is None else run_id)
    return str(caught.value)


def test_a_served_file_of_another_run_is_refused_with_both_ids() -> None:
    other = parse("random_seed = 1")
    message = reject(other.canonical(), RunFile().run_id)
    assert RunFile().run_id in message
    assert other.run_id in message


def test_a_served_file_that_is_not_canonical_is_refused() -> None:
    spaced = json.dumps(json.loads(RunFile().canonical())).encode()
    assert "not in canonical form" in reject(spaced)


def test_a_served_file_without_a_setting_is_refused() -> None:
    plain = json.loads(RunFile().canonical())
    del plain["outer"]["momentum"]
    data = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    assert "not in canonical form" in reject(data)


@pytest.mark.parametrize("later", [{"sparkle": 3}, {"codec": "int1"}])
def test_a_served_file_with_what_this_release_does_not_know_says_which_side_to_upgrade(
    later: dict[str, object],
) -> None:
    plain = json.loads(RunFile().canonical())
    plain["outer"] |= later
    data = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    said = reject(data)
    assert f"outer.{next(iter(later))} is" in said
    assert "upgrade this side with `pip install RELEASE`" in said
    assert "did you mean" not in said


def test_a_served_file_cannot_bring_seeds_along() -> None:
    plain = json.loads(RunFile().canonical()) | {"seeds": []}
    data = json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
    assert "not in canonical form" in reject(data)


def test_a_file_over_the_size_limit_is_refused_before_it_is_parsed() -> None:
    assert f"at most {RUN_FILE_MAX_BYTES}" in reject(b"[" * (RUN_FILE_MAX_BYTES + 1))
    assert f"at most {TEXT_MAX_BYTES}" in only_fault("#" * (TEXT_MAX_BYTES + 1))


LEAVES: st.SearchStrategy[Any] = (
    st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5) | st.booleans() | st.none()
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)
PATHS = sorted(
    (section, name)
    for section, settings_ in json.loads(RunFile().canonical()).items()
    for name in (settings_ if isinstance(settings_, dict) else [""])
)


@settings(max_examples=300)
@given(st.sampled_from(PATHS), VALUES)
def test_no_value_of_any_setting_gets_past_the_rules_or_crashes(
    path: tuple[str, str], value: Any
) -> None:
    plain = json.loads(RunFile().canonical())
    section, name = path
    if name:
        plain[section][name] = value
    else:
        plain[section] = value
    data = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    encoded = data.encode("utf-8", "surrogatepass")
    try:
        run = from_canonical(encoded, blake3(encoded).hexdigest())
    except RunFileError:
        return
    assert run.canonical() == encoded
    for number in msgspec.to_builtins(run.outer).values():
        assert not isinstance(number, float) or math.isfinite(number)


@settings(max_examples=100)
@given(st.sampled_from(["sources", "tokenizer", "end_token", "files", "weight", "dtype"]), VALUES)
def test_no_value_of_a_setting_of_files_gets_past_the_rules_or_crashes(
    name: str, value: Any
) -> None:
    data = FilesData(sources=[FileSource(files=["a"])])
    plain = json.loads(RunFile(data=data).canonical())
    table = plain["data"] if name in plain["data"] else plain["data"]["sources"][0]
    table[name] = value
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    encoded = text.encode("utf-8", "surrogatepass")
    try:
        run = from_canonical(encoded, blake3(encoded).hexdigest())
    except RunFileError:
        return
    assert run.canonical() == encoded


def test_the_line_of_a_setting_is_found_in_any_toml_syntax() -> None:
    text = '''# [outer]
name = """
[outer]
x = 1""" # momentum
description = 'a # b = c'
seeds = [ # first
  "/ip4/1.2.3.4/tcp/1", '# = [',
]
rounds.quorum = 'all'
[model] # momentum = 1
recipe = "gpt"
[ outer . "x.y" ]
"momentum" = 0.5

[outer]
"codec"="int4"
data = { recipe = "text", files = ["""a"b""", "c\\\\"] }
last = 1979-05-27T07:32:00Z'''
    lines = TomlLines(text)
    expected = {
        ("name",): 2,
        ("description",): 5,
        ("seeds",): 6,
        ("rounds", "quorum"): 9,
        ("model",): 10,
        ("model", "recipe"): 11,
        ("outer",): 12,
        ("outer", "x.y"): 12,
        ("outer", "x.y", "momentum"): 13,
        ("outer", "codec"): 16,
        ("outer", "data", "files"): 17,
        ("outer", "last"): 18,
        ("outer", "data", "files", "0"): 17,
        ("outer", "unknown"): 12,
        ("unknown",): None,
    }
    assert {path: lines.of(path) for path in expected} == expected


def test_the_line_of_a_setting_in_a_list_of_tables_is_found() -> None:
    lines = TomlLines("[[a.b]]\nx = 1\n[[a.b]]\ny = 2\n[c]\nd = [{ x = 1 },\n  { x = 2 }]")
    expected = {
        ("a", "b", "0", "x"): 2,
        ("a", "b", "1", "y"): 4,
        ("a", "b", "1", "z"): 3,
        ("c", "d", "0", "x"): 6,
        ("c", "d", "1", "x"): 6,
    }
    assert {path: lines.of(path) for path in expected} == expected


def test_tokens_in_shards_may_be_fewer_than_bytes() -> None:
    assert parse(
        "[model]\nvocabulary = 100\n[data]\nrecipe = 'files'\nsources = [{ files = ['a.bin'] }]"
    )


def test_the_example_is_a_valid_run() -> None:
    path = Path(__file__).parents[3] / "examples" / "tiny_gpt" / "run.toml"
    assert parse(path.read_text(), source=str(path)).name == "tiny-gpt"


# --- the owner ---------------------------------------------------------------------------------

OWNER = "12D3KooWC5mVdyoGeyBP9WU6nAFGbDLfFfsYbZwbZJRmLYeNSJwB"


def test_an_owner_that_is_no_key_is_refused() -> None:
    wrong = OWNER.replace("12D3", "13D3")
    with pytest.raises(RunFileError, match="is not that of an Ed25519 key"):
        parse(f'[policy]\nowner = "{wrong}"\n')


@pytest.mark.parametrize("key", ["{}b=1", "[{}b]", "[[{}b]]", "x={{{}b=1}}"])
@pytest.mark.parametrize("part", ["a.", '"a" . ', "'a'."])
def test_a_key_of_many_parts_is_refused_before_it_takes_time_and_memory(
    key: str, part: str
) -> None:
    """Tables were kept for every beginning of the key: 60 KB of text took 4 GB."""
    with pytest.raises(RunFileError, match="nested too deeply"):
        parse(key.format(part * 10_000))
    assert parse("description = 'a.b.c. d'").description == "a.b.c. d"


@pytest.mark.parametrize(
    ("sequences", "cycle", "momentum", "rate", "remarked"),
    [
        (9, 9, 0.0, 0.012, ""),
        (9, 9, 0.0, 0.036, "inner.learning_rate is 0.036; for a width of 128"),
        (9, 9, 0.0, 0.0038, "inner.learning_rate is 0.0038; for a width of 128"),
        (9, 9, 0.5, 0.012, "outer.momentum is 0.5"),
        (8, 9, 0.0, 0.012, "outer.steps_per_cycle is 9"),
        (8, 8, 0.0, 0.012, ""),
    ],
)
def test_momentum_rates_and_long_cycles_of_short_steps_are_remarked_on(
    sequences: int, cycle: int, momentum: float, rate: float, remarked: str
) -> None:
    run = parse(
        f"data = {{ recipe = 'python_stdlib', sequence_length = 128 }}\n"
        f"inner = {{ optimizer = 'muon', batch_size = {sequences}, learning_rate = {rate} }}\n"
        f"outer = {{ steps_per_cycle = {cycle}, momentum = {momentum} }}\n"
        "evaluation = { sequences = 1 }\n"
    )
    told = list(remarks(run))
    assert (len(told) == 1 and remarked in told[0]) if remarked else not told


@pytest.mark.parametrize(
    ("cycle", "every", "remarked"),
    [(24, 1, None), (14, 1, None), (13, 1, "5% .*every 13 steps; with 2 "), (4, 3, "6% .*with 4 ")],
)
def test_measurements_that_take_much_of_the_time_are_remarked_on(
    cycle: int, every: int, remarked: str | None
) -> None:
    """With cycles of two steps, and the default, they took a third of the time of two peers."""
    run = parse(
        "data = { recipe = 'python_stdlib', sequence_length = 128 }\n"
        "inner = { optimizer = 'muon', batch_size = 32, learning_rate = 0.012 }\n"
        f"outer = {{ steps_per_cycle = {cycle} }}\n"
        f"evaluation = {{ every_versions = {every} }}\n"
    )
    told = list(remarks(run))
    if remarked is None:
        assert not told
    else:
        assert len(told) == 1
        assert re.search(remarked, told[0])


@pytest.mark.parametrize("run", [starting("a-run"), preset("124m")])
def test_nothing_is_remarked_on_in_new_run_files(run: RunFile) -> None:
    assert not list(remarks(run))
