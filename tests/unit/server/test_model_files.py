"""End ids and sampling defaults from the checkpoint's small files."""

import json
import math

import msgspec
import pytest
from byte_model import END, IM_END, write_model

from pilotfish.engine.checkpoint.tokenizer import TokenizerError
from pilotfish.engine.errors import ConfigError
from pilotfish.server.model_files import ModelFilesError, SamplingDefaults, load_model_files


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path)


def write(folder, name, **content):
    (folder / name).write_text(json.dumps(content))


def test_both_end_ids_stop_whatever_the_sampling_defaults_are(folder):
    for choice in ("auto", "vllm"):
        assert set(load_model_files(folder, generation_config=choice).eos_token_ids) == {END, IM_END}


def test_end_ids_without_a_generation_config(folder):
    """Small Qwen3.5 models have none: one id is in config.json, the other is the tokenizer's."""
    (folder / "generation_config.json").unlink()
    assert set(load_model_files(folder).eos_token_ids) == {END, IM_END}


def test_defaults_come_from_the_checkpoint_from_nowhere_or_from_another_folder(folder, tmp_path_factory):
    write(folder, "generation_config.json", do_sample=True, temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=7)
    expected = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, max_new_tokens=7)
    assert load_model_files(folder).defaults == expected
    assert load_model_files(folder, generation_config="vllm").defaults == SamplingDefaults()
    other = tmp_path_factory.mktemp("other")
    write(other, "generation_config.json", temperature=0.1, eos_token_id=65)
    files = load_model_files(folder, generation_config=str(other))
    assert files.defaults == SamplingDefaults(temperature=0.1)
    assert 65 in files.eos_token_ids
    assert load_model_files(folder, override={"temperature": 0.2}).defaults == msgspec.structs.replace(
        expected, temperature=0.2
    )


def test_files_that_are_missing_or_wrong_are_named(folder, tmp_path):
    with pytest.raises(ModelFilesError, match="nowhere"):
        load_model_files(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"generation_config\.json: no such file"):
        load_model_files(folder, generation_config=str(tmp_path / "nowhere"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", '{"a":' * 10_000, "\xff", '{"a": ' + "9" * 5000 + "}"])
def test_a_file_that_is_no_json_object_is_named(folder, name, text):
    (folder / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=rf"{name}: (not readable as JSON|want a JSON object)"):
        load_model_files(folder)


def test_a_byte_order_mark_is_read_over(folder):
    (folder / "generation_config.json").write_text('\ufeff{"top_k": 5}', encoding="utf-8")
    assert load_model_files(folder).defaults.top_k == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", math.nan),
        ("top_p", -0.1),
        ("top_p", 2),
        ("top_k", -2),
        ("top_k", 1 << 70),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("max_new_tokens", -5),
        ("eos_token_id", -1),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [[5]]),
        ("eos_token_id", 1 << 70),
    ],
)
def test_defaults_that_no_request_may_have_are_refused_at_the_start(folder, field, value):
    write(folder, "generation_config.json", **{field: value})
    with pytest.raises(ModelFilesError, match=rf"generation_config\.json: .*{field}"):
        load_model_files(folder)


def test_ids_that_no_vocabulary_has_are_refused(folder):
    """The table of their bytes has a row for each id below them."""
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"]["vocab"]["zz"] = 1 << 30
    path.write_text(json.dumps(raw))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: want ids below 16777216, got 1073741824"):
        load_model_files(folder)


def test_of_several_templates_the_default_is_taken(folder):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    others = [{"name": ["tool_use"], "template": "x"}, "y", {"name": "default", "template": "z"}]
    write(folder, "tokenizer_config.json", chat_template=others)
    template = load_model_files(folder).chat_template
    assert template is not None and template.source == "z"


def test_parsers_follow_the_template_unless_named(model_folder):
    files = load_model_files(model_folder)
    assert (files.parses_reasoning, files.parses_tool_calls) == (True, True)
    files = load_model_files(model_folder, reasoning_parser="none", tool_call_parser="none")
    assert (files.parses_reasoning, files.parses_tool_calls) == (False, False)


def test_switches_of_the_template_that_a_server_sets(folder):
    assert load_model_files(folder, template_values={"preserve_thinking": True}).template_values
    with pytest.raises(ModelFilesError, match="--default-chat-template-kwargs: cannot set 'messages'"):
        load_model_files(folder, template_values={"messages": []})
