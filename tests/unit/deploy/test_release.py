"""The parts of a release that need no server: files, slots, systemd's and HAProxy's words."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from pilotfish.deploy.release.command import UsageError, choose, main
from pilotfish.deploy.release.managers import ManagerError, Systemd
from pilotfish.deploy.release.relay import HAProxy, RelayError
from pilotfish.deploy.release.slots import Slot, SlotLayout, SlotLayoutError, read_environment

ONE, TWO, THREE = (Slot(name, {"PILOTFISH_PORT": str(port)}) for name, port in (("one", 1), ("two", 2), ("three", 3)))


@pytest.mark.parametrize(
    ("running", "replace", "into", "old", "new"),
    [
        ([], None, None, None, "one"),
        (["one"], None, None, "one", "two"),
        (["two"], None, None, "two", "one"),
        (["one"], None, "three", "one", "three"),
        (["one", "two"], "two", None, "two", "three"),
        (["one", "two"], None, None, "slots one, two run: say which", None),
        (["one", "two", "three"], "one", None, "every slot runs", None),
        (["one"], "two", None, "slot two does not run", None),
        (["one"], None, "one", "slot one runs", None),
        (["one"], None, "four", "no slot four", None),
    ],
)
def test_which_slot_is_replaced_and_which_one_is_taken(running, replace, into, old, new):
    slots = [ONE, TWO, THREE]
    if new is None:
        with pytest.raises(UsageError, match=old):
            choose(slots, running, replace, into)
        return
    chosen = choose(slots, running, replace, into)
    assert [slot and slot.name for slot in chosen] == [old, new]


def test_an_environment_file_is_read_as_systemd_reads_it(tmp_path):
    file = tmp_path / "environment"
    file.write_text("# a comment\n; another\n\nA=b c\nB='d  e'\nC=\"f=g\"\nEMPTY=\nIT=it's\n")
    assert read_environment(file) == {"A": "b c", "B": "d  e", "C": "f=g", "EMPTY": "", "IT": "it's"}
    file.write_text("A=b\nexport C=d\n")
    with pytest.raises(SlotLayoutError, match="line 2: want NAME=VALUE, got 'export C=d'"):
        read_environment(file)


def test_slots_and_versions_that_cannot_be_used_are_named(tmp_path):
    layout = SlotLayout(tmp_path, tmp_path)
    with pytest.raises(SlotLayoutError, match="no slot"):
        layout.slots()
    (tmp_path / "one.env").write_text("PILOTFISH_PORT=eight\n")
    with pytest.raises(SlotLayoutError, match=r"one.env: want PILOTFISH_PORT=NUMBER, got 'eight'"):
        layout.slots()
    with pytest.raises(SlotLayoutError, match=r"got '\.\./x'"):
        layout.check_version("../x")
    with pytest.raises(SlotLayoutError, match="is no command"):
        layout.check_version("new")
    command = tmp_path / "versions" / "new" / "bin" / "pilotfish"
    command.parent.mkdir(parents=True)
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    (tmp_path / "versions" / "new" / "environment").write_text("PILOTFISH_FLAGS=\n")
    with pytest.raises(SlotLayoutError, match="environment: want PILOTFISH_MODEL=PATH"):
        layout.check_version("new")


@pytest.fixture
def systemctl(tmp_path, monkeypatch):
    """What systemctl and journalctl were told; a unit is active from start to stop, and slot two never starts."""
    told = tmp_path / "told"
    for name in ("systemctl", "journalctl"):
        script = tmp_path / name
        script.write_text(
            f"""#!/bin/sh
echo {name} "$@" >> {told}
case "{name} $1 $2" in
    "systemctl start pilotfish@two.service") echo "Job failed. See journalctl." >&2; exit 1 ;;
    "systemctl start "*) touch {tmp_path}/"$2" ;;
    "systemctl stop "*) rm -f {tmp_path}/"$2" ;;
    "systemctl is-active "*) if [ -e {tmp_path}/"$2" ]; then echo active; else echo activating; exit 3; fi ;;
    "systemctl show "*) echo oom-kill ;;
    "systemctl reset-failed "*) echo "Unit $2 not loaded." >&2; exit 1 ;;
    "journalctl "*) printf 'INFO fine\\nERROR no memory\\nINFO bye\\n' ;;
esac
"""
        )
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return lambda: told.read_text().splitlines()


def test_systemd_is_told_to_start_and_stop_units(systemctl):
    manager = Systemd()
    assert not manager.is_up(ONE)
    manager.start(ONE)
    assert manager.is_up(ONE) and not manager.is_up(TWO)
    manager.at_boot(ONE, True)
    manager.at_boot(TWO, False)
    manager.stop(ONE)
    assert not manager.is_up(ONE)
    assert manager.last_words(ONE) == "ERROR no memory (oom-kill)"
    told = systemctl()
    # not the words of an earlier version in the same slot
    (read,) = (line for line in told if line.startswith("journalctl"))
    assert 0 <= time.time() - int(read.split("--since=@")[1]) < 300
    for line in ("start pilotfish@one", "enable pilotfish@one", "disable pilotfish@two", "stop pilotfish@one"):
        assert f"systemctl {line}.service" in told
    with pytest.raises(ManagerError, match=r"systemctl start pilotfish@two.service: Job failed"):
        manager.start(TWO)


def test_a_machine_without_systemd_is_told_so(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ManagerError, match=r"systemctl: .*No such file"):
        Systemd().start(ONE)
    (tmp_path / "one.env").write_text("PILOTFISH_PORT=1\n")
    assert main(["--root", str(tmp_path), "--config", str(tmp_path)]) == 2
    assert "pilotfish release: systemctl: " in capsys.readouterr().err


@pytest.fixture
def stats_socket(tmp_path):
    """Answers each connection with the next of `answers`; `asked` has what came."""
    path, answers, asked = Path(tmp_path, "sock"), [], []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(1000).decode())
                    connection.sendall(answers.pop(0).encode())

        thread = threading.Thread(target=serve)
        thread.start()
        yield path, answers, asked
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


STATE = "1\n# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state\n3 servers 1 one 127.0.0.1 {} 0\n\n"


def test_haproxy_is_asked_until_the_server_is_up(stats_socket):
    path, answers, asked = stats_socket
    answers += ["\n", STATE.format(0), STATE.format(2)]
    HAProxy(path, "servers").admit(ONE)
    assert asked[0] == "set server servers/one state ready\n" and len(asked) == 3


def test_haproxys_refusals_are_told(stats_socket):
    path, answers, _ = stats_socket
    answers += ["No such server.\n", STATE.format(2), "Can't find backend.\n", "Permission denied\n"]
    relay = HAProxy(path, "servers")
    with pytest.raises(RelayError, match="server two: No such server"):
        relay.withhold(TWO)
    with pytest.raises(RelayError, match=r"no server two: \['one'\]"):
        relay.check([ONE, TWO])
    with pytest.raises(RelayError, match="Can't find backend"):
        relay.check([ONE])
    with pytest.raises(RelayError, match="Permission denied"):
        relay.withhold(ONE)
    with pytest.raises(RelayError, match="nobody"):
        HAProxy(path.with_name("nobody"), "servers").withhold(ONE)
