# Each target does all the set-up it needs on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL ?= demo/model
K ?= 3
PORT ?= 8000
# what clients call it; other checkpoints by their folder's or hub name
NAME ?= $(if $(filter demo/model,$(MODEL)),demo)
JOBS ?= 2
SEED ?= 1
COMMA := ,
# where a GPU is, with what reads prompts on it
EXTRAS ?= dev$(if $(shell command -v nvidia-smi),$(COMMA)gpu)
GPU_PYTHON ?= $(BIN)/python
GPU_SETUP := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.installed)
OUT ?= gpu-results
OLDEST ?= .venv-oldest
OLDEST_TORCH ?=
OLDEST_TESTS ?= tests/unit $(addprefix tests/e2e/test_,$(addsuffix .py,openai_client messages_api responses_api openapi \
  structured token_rules faults cors origins limits tls))
LEGS ?=

.PHONY: demo serve chat test test-oldest check bench audit fuzz mutation soak screenshots gpu-test gpu-bench clean

$(VENV)/.installed: pyproject.toml setup.py
	@echo "setting up $(VENV), once: a few minutes, most of them for torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	touch $@

demo: $(VENV)/.installed  ## start the server on the demo model, ask it something, show acceptance
	$(BIN)/python demo/try_it.py

serve: $(VENV)/.installed
	$(BIN)/pilotfish serve $(MODEL) --num-speculative-tokens $(K) --port $(PORT) $(if $(NAME),--served-model-name $(NAME))

chat: $(VENV)/.installed  ## talk with the model in the terminal, without a server beside it
	$(BIN)/pilotfish chat $(MODEL) -- --num-speculative-tokens $(K)

# a worker takes the next file, in the order of tests/conftest.py
PYTEST := -m pytest -m "not gpu" -n $(JOBS) --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed
	$(BIN)/python $(PYTEST) tests/unit
	$(BIN)/python $(PYTEST) --ignore tests/unit

# OLDEST_TORCH='torch==2.13.0+cpu' for another torch than the lowest, UV_FIND_LINKS=DIR for its wheel
test-oldest:  ## unit and protocol tests with the lowest version of each dependency, in a venv of its own
	$(PYTHON) -m venv --clear $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --disable-pip-version-check 'uv>=0.9,<1'
	echo '$(OLDEST_TORCH)' > $(OLDEST)/overrides.txt
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct \
	  --override $(OLDEST)/overrides.txt -r pyproject.toml --extra dev
	$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --no-deps -e .
	$(OLDEST)/bin/uv pip list --python $(OLDEST)/bin/python
	$(OLDEST)/bin/python $(PYTEST) $(OLDEST_TESTS)

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python tests/bench/bench_decode.py $(MODEL)

audit: $(VENV)/.installed
	$(BIN)/pilotfish audit $(MODEL)

fuzz: $(VENV)/.installed  ## grammars, then hostile requests to the server, on the scripted engine, and on the model
	$(BIN)/python -m tests.fuzz.grammars --count 50000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz.campaign --requests 10000 --sessions 2000 --seed $(SEED)
	$(BIN)/python -m tests.fuzz.campaign --requests 1000 --seed $(SEED) --model $(MODEL)

mutation: $(VENV)/.installed  ## small faults in the engine, one at a time: the audit must name all that change a token
	$(BIN)/python -m tests.mutation.campaign

soak: $(VENV)/.installed  ## attacks beside a victim's stream, then 64 streaming clients (10 minutes on the model, one at 200 tokens/s), then conversations on memory for fewer (10 minutes)
	$(BIN)/python -m tests.soak.attacks --seconds 10 --model $(MODEL)
	$(BIN)/python -m tests.soak.soak --seconds 600 --model $(MODEL)
	$(BIN)/python -m tests.soak.soak --seconds 60 --rate 200
	$(BIN)/python -m tests.soak.conversations --seconds 600 --model $(MODEL)

screenshots: $(VENV)/.installed  ## pictures of the page for docs/, two minutes; wants Chromium
	$(BIN)/python -m tests.support.screenshots

# on a machine without network: make gpu-test GPU_PYTHON=python3, with the packages at hand
gpu-test: $(GPU_SETUP)  ## tests/gpu/legs.py says what a leg is; LEGS="linear moe" runs these
	$(GPU_PYTHON) -m tests.gpu.legs test $(LEGS) --out $(OUT)

gpu-bench: $(GPU_SETUP)
	$(GPU_PYTHON) -m tests.gpu.legs bench $(LEGS) --out $(OUT)

gpu-tools: $(GPU_SETUP)  ## every tool on the demo model, on the device there is
	$(GPU_PYTHON) -m tests.gpu.legs tools $(LEGS) --out $(OUT)

clean:
	rm -rf $(VENV) $(OLDEST) build *.egg-info .mypy_cache .ruff_cache .pytest_cache
