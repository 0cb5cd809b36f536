"""What is mistaken for a checkpoint is called by its name, in one line that says what to do."""

from __future__ import annotations

import gzip
import io
import json
import os
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from pilotfish.engine.check.audit.requests import load_prompts
from pilotfish.engine.checkpoint.foreign import what_file
from pilotfish.engine.checkpoint.headers import read_header
from pilotfish.engine.checkpoint.hub import resolve_model
from pilotfish.engine.checkpoint.recognise import open_checkpoint
from pilotfish.engine.checkpoint.sidecar import attach_head
from pilotfish.engine.checkpoint.tokenizer import read_tokenizer
from pilotfish.engine.errors import CheckpointError, ConfigError, HeaderError, PilotfishError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4995584424\n"


def archive() -> bytes:
    """As torch.save writes one."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02}.")
    return buffer.getvalue()


FILES = {
    "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`": POINTER,
    "a web page, not the file itself": b"<!DOCTYPE html>\n<html><head><title>Sign in</title>",
    "a web page, not the file": b"\n  <HTML><body>429 Too Many Requests</body></html>",
    "a web page": b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>',
    "a GGUF file": b"GGUF\x03\0\0\0" + b"\1" * 64,
    "a zip archive, as torch.save writes it": archive(),
    "a Python pickle": b"\x80\x02}q\0." + b"\0" * 16,
    "compressed by gzip": gzip.compress(b"{}" * 40),
    "empty": b"",
    "zeros alone": b"\0" * 4096,
}


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_that_is_no_checkpoint_s_is_named(draft, what, name):
    folder = draft("dense").write()
    (folder / name).write_bytes(FILES[what])
    with pytest.raises((HeaderError, ConfigError), match=f"{name}: {what}") as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_pointers_in_the_other_files(draft, tmp_path):
    folder = draft("dense").write()
    (folder / "tokenizer.json").write_bytes(POINTER)
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read: a Git LFS pointer"):
        read_tokenizer(folder)
    with pytest.raises(CheckpointError, match=r"tokenizer.json cannot be read: a Git LFS pointer"):
        load_prompts(folder, 2, 320)
    (folder / "model.safetensors.index.json").write_bytes(POINTER)
    with pytest.raises(ConfigError, match=r"index.json: a Git LFS pointer"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").unlink()
    for name in ("head.gguf", "head.safetensors"):
        (tmp_path / name).write_bytes(POINTER)
        with pytest.raises(HeaderError, match=f"{name}: .*a Git LFS pointer"):
            attach_head(open_checkpoint(folder), tmp_path / name)


def test_a_sound_header_is_never_taken_for_another_file(tmp_path):
    """Its length, the first eight bytes, may spell whatever it likes: here as a zip archive begins."""
    length = int.from_bytes(b"PK\x03\x04" + bytes(4), "little")
    file = tmp_path / "a.safetensors"
    with file.open("wb") as opened:
        opened.write(length.to_bytes(8, "little") + b"{}")
        opened.truncate(8 + length)
    assert what_file(length.to_bytes(8, "little") + b"{}") is not None
    with pytest.raises(HeaderError, match="not acceptable JSON"):
        read_header(file)


def adapter(folder):
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 64)}, folder / "adapter_model.safetensors")


def touch(*files):
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"{}")


def folders(root):
    """Each kind of folder, and what is said of it."""
    model = root / "hub" / "models--Qwen--Qwen3.5-4B"
    touch(model / "snapshots" / "abc" / "config.json", model / "refs" / "main")
    trainer = root / "trainer"
    touch(*(trainer / f"checkpoint-{step}" / "config.json" for step in (90, 1000)), trainer / "trainer_state.json")
    for step in (900, 1000):
        os.utime(trainer / f"checkpoint-{90 if step == 900 else step}" / "config.json", (step, 2000 - step))
    adapter(root / "adapter")
    adapter(root / "adapters" / "checkpoint-7")
    touch(root / "dcp" / "config.json", root / "dcp" / "pytorch_model_fsdp_0" / "__0_0.distcp")
    touch(root / "deepspeed" / "config.json", root / "deepspeed" / "zero_to_fp32.py")
    touch(root / "megatron" / "latest_checkpointed_iteration.txt")
    touch(root / "gguf" / "model-Q4_K_M.gguf")
    touch(root / "pickles" / "config.json", root / "pickles" / "pytorch_model.bin")
    touch(root / "download" / "model.safetensors.aria2")
    touch(root / "outer" / "inner" / "config.json")
    (root / "nothing").mkdir()
    return {
        root: r"the hub cache, of 1 model\(s\); want a hub id such as Qwen/Qwen3.5-4B",
        root / "hub": "the hub cache, of 1 model",
        model: rf"one model's folder of the hub cache; want its snapshot {model}/snapshots/abc",
        trainer: rf"a trainer's output folder; want one of its checkpoints, the newest is {trainer}/checkpoint-1000",
        root / "adapter": "a PEFT adapter without its base model; merge it first .*--merge-lora",
        root / "adapters": r"a trainer's output folder of adapters, the newest .*checkpoint-7; merge it",
        root / "dcp": "an FSDP or DCP training state; merge it first",
        root / "deepspeed": "a DeepSpeed training state; merge it first",
        root / "megatron": "a Megatron training state; convert it",
        root / "gguf": r"a folder of GGUF files \(model-Q4_K_M.gguf\); want safetensors",
        root / "pickles": r"weights in pickle files alone \(pytorch_model.bin\)",
        root / "download": "an unfinished download",
        root / "outer": f"no checkpoint itself; did you mean {root}/outer/inner",
        root / "nothing": "an empty folder",
    }


def test_folders_that_are_no_checkpoint_are_named(draft, tmp_path):
    (tmp_path / "root").mkdir()
    config = json.dumps(draft("dense").config)
    for folder, what in folders(tmp_path / "root").items():
        if (folder / "config.json").exists():
            (folder / "config.json").write_text(config)
        with pytest.raises(PilotfishError, match=what) as caught:
            open_checkpoint(resolve_model(str(folder)))
        assert "\n" not in str(caught.value)


def test_a_file_in_place_of_a_folder(draft, tmp_path):
    folder = draft("dense").write()
    with pytest.raises(CheckpointError, match=f"model.safetensors: a file; want its folder, {folder}"):
        resolve_model(str(folder / "model.safetensors"))
    (tmp_path / "m.gguf").write_bytes(FILES["a GGUF file"])
    with pytest.raises(CheckpointError, match=r"m.gguf: a GGUF file; want safetensors \(--draft-head"):
        resolve_model(str(tmp_path / "m.gguf"))


def test_broken_links_of_a_cache_are_named(draft, tmp_path):
    """A snapshot that was copied without its blobs."""
    folder = draft("dense").write()
    (folder / "model.safetensors").rename(tmp_path / "blob")
    for name, error in (("model.safetensors", HeaderError), ("config.json", ConfigError)):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("../../blobs/0abc")
        with pytest.raises(error, match=rf"{name}: a link to ../../blobs/0abc, which is not there; fetch it again"):
            open_checkpoint(folder)
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / "blob")


def test_an_error_message_in_place_of_a_config(draft):
    folder = draft("dense").write()
    (folder / "config.json").write_text('{"error": "Repository not found"}')
    with pytest.raises(ConfigError, match=r"config.json: an error message in place of the file.*Repository not found"):
        open_checkpoint(folder)
