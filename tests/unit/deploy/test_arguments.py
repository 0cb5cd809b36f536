"""What the tools' arguments have in common: a server's address is told from a checkpoint."""

import pytest

from pilotfish.deploy import collect_env
from pilotfish.deploy.arguments import is_address
from pilotfish.deploy.chat import command as chat
from pilotfish.deploy.evaluate import command as evaluate
from pilotfish.deploy.gate import command as gate
from pilotfish.deploy.sweep import command as sweep
from pilotfish.engine.command_line.parser import Parser


@pytest.mark.parametrize("target", ["127.0.0.1:8000", "localhost:8000", "gpu-3.example:8000/v1"])
@pytest.mark.parametrize(
    "main", [chat.main, evaluate.main, gate.main, collect_env.main, lambda a: sweep.main(["--url", *a])]
)
def test_an_address_without_its_scheme_is_no_checkpoint(main, target, capsys):
    with pytest.raises(SystemExit) as ended:
        main([target])
    assert ended.value.code == 2 and f"http://{target}" in capsys.readouterr().err


def test_addresses_hub_ids_and_folders_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd:1").mkdir()
    parser = Parser(prog="x")
    known = {"http://h:1": True, "https://h/llm": True, "Qwen/Qwen3.6-27B": False, "odd:1": False, "/srv/m": False}
    assert {target: is_address(parser, target) for target in known} == known
