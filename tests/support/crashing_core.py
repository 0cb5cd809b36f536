"""The scripted core, which five seconds after it was loaded kills its own process, or the server with it."""

from __future__ import annotations

import os
import signal
import threading

import scripted_core

SECONDS = 5.0


def make_core(options) -> scripted_core.ScriptedCore:
    threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return scripted_core.make_core(options)


def make_core_of_a_server_that_crashes(options) -> scripted_core.ScriptedCore:
    threading.Timer(SECONDS, os.kill, (os.getppid(), signal.SIGKILL)).start()
    return scripted_core.make_core(options)
