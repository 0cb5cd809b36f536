"""`pilotfish release` with the gates of `pilotfish gate`, on the demo model: what is broken is named and goes back."""

import json
import shutil
import urllib.request

import pytest
from demo_models import DEMO, changed_demo, drop_tensor, shift_norms
from processes import PATIENCE
from releases import done, find_haproxy, machine

FLAGS = "--max-model-len 1024 --max-num-seqs 1 --no-cost-table"
GATES = ("--only", "version,k served,head weights,head rank,chat template,stays up", "--watch", "1")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with machine(tmp_path_factory.mktemp("site"), find_haproxy()) as made:
        made.add_version("sound", DEMO, FLAGS)
        assert done(made.release("sound", "--steady", "0", gates=GATES)) == 0
        yield made


def with_a_bad_template(folder):
    """Most of what a user says is not in the prompt."""
    shutil.copytree(DEMO, folder)
    file = folder / "chat_template.jinja"
    text, sound = file.read_text(), "user\\n' ~ content ~"
    assert text.count(sound) == 1
    file.write_text(text.replace(sound, sound.replace("content", "content[:8]")))
    return folder


@pytest.mark.parametrize(
    ("broken", "flags", "gates"),
    [
        (lambda folder: changed_demo(folder, shift_norms), FLAGS, ["head rank"]),
        (lambda folder: changed_demo(folder, drop_tensor), FLAGS, ["k served", "head weights", "head rank"]),
        (with_a_bad_template, FLAGS, ["chat template"]),
    ],
    ids=["norms of the head", "a tensor of the head", "template"],
)
def test_a_broken_version_leaves_the_old_one_and_names_the_gate(site, tmp_path, broken, flags, gates):
    site.add_version("broken", broken(tmp_path / "model"), flags)
    assert done(site.release("broken", "--steady", "0", gates=GATES)) == 1
    record = site.records()[-1]
    assert (record["outcome"], record["failed"]) == ("rolled back", gates)
    assert record["gates"][-1]["name"] == "old version" and record["gates"][-1]["passed"]
    with urllib.request.urlopen(site.relay_url + "/v1/models", timeout=PATIENCE) as response:
        assert json.load(response)["data"][0]["id"] == "sound"
