# All set-up happens here: `make demo` and `make test` work from a fresh clone with Python 3.10+ and a C++ compiler.
PYTHON ?= python3
TORCH  ?= torch~=2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-fast lowest check bench install clean

install: $(STAMP)

# torch first, so that a CPU wheel at hand is taken instead of gigabytes of CUDA
$(STAMP): pyproject.toml CMakeLists.txt $(wildcard tpi/kernels/native/* allreduce/native/* testbed/native/*)
	@command -v c++ >/dev/null || { echo "No C++ compiler found: install one (Debian/Ubuntu: apt install g++; macOS: xcode-select --install)."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet "$(TORCH)"
	$(BIN)/pip install --quiet --editable ".[test]"
	@touch $@

demo: $(STAMP)
	$(BIN)/tpi pull smollm2-135m
	$(BIN)/tpi run -m smollm2-135m -p "What is the capital of France? Answer in one sentence." --local 2 --temp 0 -n 64

# four files at a time, each on one core: most of the time they wait for a network, a disk or a deadline
PARALLEL := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses=4 --dist=loadfile --no-loadscope-reorder -m "not alone"

# everything; what measures time or the machine comes last, alone, also where something failed before
test: $(STAMP)
	@failed=0; $(PARALLEL) || failed=1; \
	$(BIN)/pytest $$(grep -rl --include="*.py" "mark\.alone" tests) -m alone || failed=1; exit $$failed

# the unit tests but those
test-fast: $(STAMP)
	$(PARALLEL) tests/unit

# the unit tests with the lowest versions that pyproject.toml allows, in an environment of their own; PYTHON=python3.10, too
lowest:
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" .ci/lowest

# all of them, also if the first fails; the last one checks the wording of docstrings, messages and pages
check: $(STAMP)
	@failed=0; for tool in "ruff check ." "ruff format --check ." mypy "python .ci/prose.py"; do $(BIN)/$$tool || failed=1; done; exit $$failed

# `make bench ARGS=--list` says how long each takes, ARGS=--quick sees in under five minutes that they work
bench: $(STAMP)
	$(if $(filter --quick --list compare,$(ARGS)),,$(BIN)/pip install --quiet --editable ".[test,bench]")
	$(BIN)/python -m benchmarks $(ARGS)

clean:
	rm -rf $(VENV) build
