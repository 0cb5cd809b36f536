"""The systemd unit, read by systemd itself."""

import configparser
import subprocess
import sys
from pathlib import Path

from pilotfish.deploy.release.managers import UNIT as UNIT_NAME
from pilotfish.deploy.release.slots import SlotLayout
from pilotfish.server.cli import build_parser
from pilotfish.server.http.app import ServerOptions
from tests.support.tools import needed

UNIT = Path(__file__).resolve().parents[3] / "deploy" / "systemd" / "pilotfish@.service"
EXECUTABLE = "/opt/pilotfish/slots/%i/bin/pilotfish"


def analyze(*args):
    command = [needed("systemd-analyze", "apt-get install systemd"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def installed(tmp_path, old=EXECUTABLE, new=sys.executable):
    """As shipped, but for the executable, which verify wants to be there."""
    text = UNIT.read_text()
    assert text.count(old) == 1
    unit = tmp_path / UNIT_NAME.format("one")
    unit.write_text(text.replace(EXECUTABLE, sys.executable).replace(old, new))
    return unit


def test_verify_has_nothing_to_say(tmp_path):
    done = analyze("verify", "--man=no", installed(tmp_path))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_verify_would_say_something(tmp_path):
    """It names an unknown key and ends with 0: only its words can be trusted."""
    done = analyze("verify", "--man=no", installed(tmp_path, "PrivateTmp=yes", "PrivateTemp=yes"))
    assert "PrivateTemp" in done.stdout + done.stderr


def test_little_is_exposed(tmp_path):
    """systemd's own measure, from 0 to 10 in tenths; a service without hardening has 9.6."""
    done = analyze("security", "--offline=true", "--threshold=25", "--no-pager", installed(tmp_path))
    assert done.returncode == 0, done.stdout.splitlines()[-1:] + done.stderr.splitlines()


def service():
    # `strict=False`: Environment= and EnvironmentFile= stand there twice
    unit = configparser.ConfigParser(strict=False, interpolation=None, delimiters="=")
    unit.read(UNIT)
    return unit["Service"]


def test_it_agrees_with_the_server():
    words = service()["ExecStart"].split()[1:]
    args = build_parser().parse_args(
        [{"$PILOTFISH_FLAGS": "--max-num-seqs=1", "${PILOTFISH_PORT}": "1"}.get(word, word) for word in words]
    )
    closing = args.shutdown_timeout + ServerOptions(served_names=("m",)).close_seconds
    assert float(service()["TimeoutStopSec"].removesuffix("s")) > closing
    assert service()["KillMode"] == "mixed" and service()["RestartPreventExitStatus"] == "2"
    assert args.log_requests and not args.log_prompts


def test_it_starts_what_a_release_without_systemd_starts(tmp_path):
    """One layout of files, two who read it."""
    version = tmp_path / "versions" / "new"
    version.mkdir(parents=True)
    (version / "environment").write_text("PILOTFISH_MODEL=/srv/models/m\nPILOTFISH_FLAGS='--max-num-seqs 4'\n")
    (tmp_path / "one.env").write_text("PILOTFISH_PORT=8001\nPILOTFISH_FLAGS='--max-num-seqs 8 --dtype auto'\n")
    layout = SlotLayout(tmp_path, tmp_path)
    (slot,) = layout.slots()
    layout.link(slot, "new")
    values = layout.environment(slot)
    command = service()["ExecStart"].replace("/opt/pilotfish", str(tmp_path)).replace("%i", slot.name)
    for name, value in values.items():
        command = command.replace(f"${{{name}}}", value).replace(f"${name}", value)
    assert command.split() == layout.command(slot)
    assert values["PILOTFISH_FLAGS"].endswith("auto"), "the slot's variables win"
    files = [line for line in UNIT.read_text().splitlines() if line.startswith("EnvironmentFile=")]
    assert files == ["EnvironmentFile=/opt/pilotfish/slots/%i/environment", "EnvironmentFile=/etc/pilotfish/%i.env"]
