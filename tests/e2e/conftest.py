"""Fixtures of the end-to-end tests: the real application and engine process, a scripted core in place of a model."""

import contextlib
import functools
import gc
import sys
from pathlib import Path

import openai
import pytest

SUPPORT = Path(__file__).resolve().parents[1] / "support"
if str(SUPPORT) not in sys.path:
    sys.path.append(str(SUPPORT))

from byte_model import write_model  # noqa: E402  (the path above makes it importable)
from serving import serving_in_thread  # noqa: E402

DEMO = Path(__file__).resolve().parents[2] / "demo" / "model"
CORE = "pilotfish.engine.start:make_core"


@pytest.fixture(autouse=True)
def test_tells_what_it_left_open():
    """An error of this test, not of the one during which it is collected."""
    yield
    gc.collect()


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One server for all tests of a file that leave it as they found it."""
    with serving_in_thread(write_model(tmp_path_factory.mktemp("model")), engine={"max_num_seqs": 8}) as running:
        yield running


@pytest.fixture(scope="session")
def demo_server():
    """A server of the demo model for each k that is asked for, kept for all files: a start takes seconds."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def start(k):
            engine = {"num_speculative_tokens": k, "max_model_len": 1024, "num_threads": 1}
            return stack.enter_context(serving_in_thread(DEMO, core=CORE, engine=engine))

        yield start


@pytest.fixture(scope="module", params=[0, 3], ids=["k0", "k3"])
def demo_client(request, demo_server):
    """OpenAI's client to the demo model, without speculation and with it: the text must be the same."""
    url = demo_server(request.param).v1
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def written():
    """What each test saw first; the server with the other k must give the same."""
    return {}
