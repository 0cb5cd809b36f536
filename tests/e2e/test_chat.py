"""`pilotfish chat` beside a server: in a terminal and through pipes; nothing that an answer holds gives orders to the
terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from serving import PATIENCE, script

from pilotfish.deploy.chat.screen import printable

COMMAND = [sys.executable, "-m", "pilotfish.server.cli", "chat"]
HOSTILE = "red \x1b[31m bell \x07 title \x1b]0;pwned\x07 c1 \x9b2J back\rover turn \u202e tag \U000e0041 end"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, \n\ttabs, 👩\u200d💻", "plain, ünïcode, \n\ttabs, 👩\u200d💻"),
        ("\x1b[2J\x00\x7f\r", "␛[2J␀␡␍"),
        ("\x9b\u202e\u2066\ud800\u2028\U000e0041", "������"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown


def piped(server, text, *flags):
    done = subprocess.run(
        [*COMMAND, server.url, *flags], input=text.encode(), capture_output=True, timeout=PATIENCE, check=False
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def test_a_piped_text_is_one_message_and_only_its_answer_is_on_stdout(server):
    status, out, said = piped(server, script("two\nlines", reply="An answer.\n", runs=[2], drafted=3))
    assert (status, out) == (0, "An answer.\n\n")
    assert re.fullmatch(r"\[\d+ tokens, .* acceptance length 2\.00 at k = 3 \(\d+ of \d+ drafts accepted\)\]\n", said)


def test_no_control_character_of_an_answer_is_written(server):
    _, out, _ = piped(server, script(reply=HOSTILE))
    assert out == printable(HOSTILE) + "\n" and "\x1b" not in out and "pwned" in out


def test_flags_go_with_the_request(server):
    status, out, said = piped(server, script(reply="x" * 50, drafted=3), "--max-tokens", "7", "--k", "0")
    assert (status, out) == (0, "x" * 7 + "\n") and "cut off by max_tokens" in said


def test_what_is_wrong_is_told_in_a_line(server):
    status, out, said = piped(server, "x", "--k", "9")
    assert (status, out) == (1, "") and said.startswith("pilotfish chat: ") and "speculates with k = 3, got 9" in said
    refused = subprocess.run(
        [*COMMAND, "http://127.0.0.1:9"], input=b"x", capture_output=True, timeout=PATIENCE, check=False
    )
    assert refused.returncode == 1 and b"127.0.0.1:9: /v1/models: [Errno" in refused.stderr


class Terminal:
    """A chat in a terminal of its own."""

    def __init__(self, *args):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ["TERM"] = "dumb"
            os.execv(sys.executable, [*COMMAND, *args])
        self.seen = ""

    def until(self, wanted):
        """What was written up to these words."""
        deadline = time.monotonic() + PATIENCE
        while wanted not in self.seen:
            assert time.monotonic() < deadline, (wanted, self.seen)
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += os.read(self.fd, 4096).decode()
        found, _, self.seen = self.seen.partition(wanted)
        return found

    def type(self, text):
        os.write(self.fd, text.encode())


def test_a_conversation_in_a_terminal(server):
    terminal = Terminal(server.url, "--system", "Be brief.")
    terminal.until(">>> ")
    terminal.type(script(reply="first", drafted=3) + "\n")
    assert "acceptance length" in terminal.until(">>> ")
    # an endless answer ends with Ctrl-C, and the conversation goes on
    terminal.type(script(reply="on and ", times=500, delay=0.05) + "\n")
    terminal.until("on and on")
    terminal.type("\x03")
    assert "interrupted" in terminal.until(">>> ")
    terminal.type("/k 9\n")
    terminal.until(">>> ")
    terminal.type("refused\n")
    assert "k = 3, got 9" in terminal.until(">>> ")
    for line, told in (("/k", ""), ("/nonsense", "/again"), ("/new", ""), ("/again", "nothing was asked")):
        terminal.type(line + "\n")
        assert told in terminal.until(">>> ")
    terminal.type("/exit\n")
    _, status = os.waitpid(terminal.pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
