# Two commands: `make demo` (the whole loop on this machine) and `make test`. See README.md.
PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV := .venv
BIN := $(VENV)/bin
# PyTorch's own index of CPU builds, used if the configured index has no CPU build of torch.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install -q --no-deps --require-hashes
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
EXAMPLES := .venv-examples
LOCKS := $(patsubst %,requirements/%.txt,build torch cpu dev deepspeed)

.PHONY: setup clients examples demo test check clean
setup: $(STAMP)

$(STAMP): $(LOCKS) pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "flywheel: $(PYTHON) is not on the PATH. Install Python 3.11, or name another: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "flywheel: $(PYTHON) is older than Python 3.11. Name one that is not: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 2; }
	@command -v cc >/dev/null || command -v gcc >/dev/null || { echo "flywheel: no C compiler found, and vLLM compiles small kernels at start. On Debian: apt-get install gcc g++ python3-dev"; exit 2; }
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || { echo "flywheel: libnuma.so.1 is missing, and vLLM's CPU build is linked against it. On Debian: apt-get install libnuma1"; exit 2; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@echo "[1/5] build tools";            $(INSTALL) -r requirements/build.txt
	@echo "[2/5] PyTorch, CPU build";     case $$($(BIN)/python -c 'import sys; print(*sys.version_info[:2])') in \
	    "3 11") torch="--require-hashes -r requirements/torch.txt" ;; \
	    *) torch=$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' requirements/torch.txt) ;; \
	  esac; \
	  $(PIP) install -q --no-deps $$torch 2>$(VENV)/torch.log || $(PIP) install -q --no-deps $$torch --index-url $(TORCH_CPU_INDEX) || { cat $(VENV)/torch.log; exit 1; }
	@echo "[3/5] vLLM, CPU build, and the pinned rest (about a minute)"; $(INSTALL) -r requirements/cpu.txt -r requirements/dev.txt
	@echo "[4/5] DeepSpeed, built against it"; DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation -r requirements/deepspeed.txt
	@echo "[5/5] flywheel";               $(PIP) install -q --no-deps --no-build-isolation -e .
	@touch $@; echo "ready: $(BIN)/flywheel --help"

# The clients that the tests run against the explorer, including Node's, in an environment of their own.
clients: setup $(CLIENTS)/.installed

$(CLIENTS)/.installed: requirements/clients.txt requirements/agent.txt requirements/agentscope-1.txt tests/clients/package-lock.json
	@test -x $(CLIENTS)/bin/pip || $(PYTHON) -m venv $(CLIENTS)
	@echo "[1/2] clients in Python, and Node";  $(CLIENTS)/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes -r requirements/clients.txt
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes --upgrade --target $(CLIENTS)/agentscope-1 -r requirements/agentscope-1.txt
	@test -x $(CLIENTS)/agent/bin/pip || $(PYTHON) -m venv $(CLIENTS)/agent
	@$(CLIENTS)/agent/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes -r requirements/agent.txt
	@echo "[2/2] the client in Node";           PATH="$(CURDIR)/$(CLIENTS)/bin:$$PATH" npm ci --prefix tests/clients --ignore-scripts --no-audit --no-fund --loglevel=error
	@touch $@

# Frameworks and worlds of the examples, in an environment of their own: `flywheel demo NAME` runs there.
examples: setup $(EXAMPLES)/.installed

$(EXAMPLES)/.installed: requirements/clients.txt requirements/agentscope-1.txt requirements/examples.txt requirements/alfworld.txt
	@test -x $(EXAMPLES)/bin/pip || $(PYTHON) -m venv $(EXAMPLES)
	@echo "[1/3] agents' frameworks";  $(EXAMPLES)/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes -r requirements/clients.txt
	@$(EXAMPLES)/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes --upgrade --target $(EXAMPLES)/agentscope-1 -r requirements/agentscope-1.txt
	@$(EXAMPLES)/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes -r requirements/build.txt
	@echo "[2/3] worlds";              $(EXAMPLES)/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes --no-build-isolation -r requirements/examples.txt
	@$(EXAMPLES)/bin/python -m pip --disable-pip-version-check install -q --no-deps --no-build-isolation -e agent_sdk
	@! $(EXAMPLES)/bin/python -m pip --disable-pip-version-check check | grep -v -e "^No broken requirements" -e "^jericho .* requires spacy" -e "^textworld .* not supported"
	@echo "[3/3] ALFWorld, whose planner is compiled here (two minutes)"; \
	  PATH="$(CURDIR)/$(EXAMPLES)/bin:$$PATH" $(EXAMPLES)/bin/python -m pip --disable-pip-version-check install -q --no-deps --require-hashes --no-build-isolation -r requirements/alfworld.txt 2>$(EXAMPLES)/alfworld.log || \
	  echo "flywheel: ALFWorld was not built (it needs make and g++; $(EXAMPLES)/alfworld.log says more): the example alfworld does not start, the others do. On Debian: apt-get install g++ make"
	@touch $@; echo "ready: $(BIN)/flywheel demo --list"

demo: setup
	$(BIN)/flywheel demo $(DEMO_FLAGS)

# COVERAGE=0 measures no coverage. WORKERS=0 runs all tests in one process; the default exceeds the cores of a small
# machine, because tests often wait for other processes.
COVERAGE ?= 1
WORKERS ?= 3
PYTEST := -m pytest -n $(WORKERS) --no-loadscope-reorder
test: setup clients examples
ifeq ($(COVERAGE),0)
	$(BIN)/python $(PYTEST) $(TEST_FLAGS)
else
	$(BIN)/coverage erase
	$(BIN)/coverage run $(PYTEST) $(TEST_FLAGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report $(if $(TEST_FLAGS),--fail-under=0)
endif

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd agent_sdk && ../$(BIN)/mypy --config-file ../pyproject.toml --python-version 3.10 -p flywheel
	cd agent_sdk && ../$(BIN)/lint-imports

clean:
	rm -rf $(VENV) $(CLIENTS) $(EXAMPLES) tests/clients/node_modules demo-data .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
