"""Every block of the pages that says `run` is run as it stands, against the demo model on a port of the test's own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from serving import serving_in_thread

from tests.support.documents import PAGES, ROOT, blocks

BLOCKS = [block for page in PAGES for block in blocks(page) if block.mark == "run"]
WRITTEN = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def demo():
    engine = {"num_speculative_tokens": 3, "max_model_len": 2048, "num_threads": 1}
    options = {"core": "pilotfish.engine.start:make_core", "engine": engine, "served_names": ("demo",)}
    with serving_in_thread(ROOT / "demo" / "model", **options) as server:
        yield server


@pytest.fixture
def checkout(tmp_path):
    """Where commands run: what they name is there, and what they write stays out of the repository."""
    for path in ROOT.iterdir():
        if path.name[0] != ".":
            tmp_path.joinpath(path.name).symlink_to(path)
    return tmp_path


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs(block, demo, checkout):
    if "curl" in block.text and not shutil.which("curl"):
        # the pages show it to users, who may have it or not; CI's machine has it
        pytest.skip("curl is not installed: apt-get install curl")
    interpreters = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*interpreters[block.language], block.text.replace(WRITTEN, demo.url)],
        cwd=checkout,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert '"error":{' not in said and "Traceback" not in said, said
