# Every target sets up what it needs. `make demo` and `make test` are the two that a newcomer wants.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
INSTALLED := $(VENV)/.installed
LINTERS := $(VENV)/.linters
WORKERS ?= 2
PYTEST_ARGS ?=
# One variant in so many is lowered: CI takes every tenth, for its time.
EVERY ?= 1
PLUGGY_VERSIONS ?= 1.5.0 1.6.0 1.7.0

# Small tensors: more threads than worker processes only make them wait for each other.
export OMP_NUM_THREADS ?= 1

.PHONY: help demo test lint check coverage lowering compile-kernels compile-kernels-check compile-kernels-whole mutants example-vendor certify-example certificates gpu-suite pluggy-matrix test-sglang test-vllm engines-gpu drift-corpus drift-fuzz clean

help: ## show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | sort

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hwbackends needs Python 3.11 or newer; name one: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet --constraint constraints.txt --editable '.[reference,transformers,test]'
	@touch $@

$(LINTERS): pyproject.toml $(INSTALLED)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[lint]'
	@touch $@

demo: $(INSTALLED) ## serve two real hybrid architectures here and compare every token with the stock model's
	$(BIN)/hwbackends demo --model inkling
	$(BIN)/hwbackends demo --model lfm2

test: $(INSTALLED) ## run the test suite
	$(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)

coverage: $(INSTALLED) ## branch coverage of the test suite and of the conformance kit on the reference
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n $(WORKERS) $(PYTEST_ARGS)
	$(BIN)/coverage run -m hwbackends conformance run reference -q
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing --skip-covered

lint: $(LINTERS) ## formatting, lint, types, and which part may import which
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: $(INSTALLED) ## hold this tree's own hooks against the contract, and every call against its definition
	$(BIN)/hwbackends check hwbackends examples
	$(BIN)/hwbackends check hwbackends tests examples --drift

lowering: ## lower every Ascend kernel with the vendor's compiler, in an environment of its own (Python 3.11)
	PYTHON=$(PYTHON) tools/lowering/run.sh --every $(EVERY)

compile-kernels: $(INSTALLED) ## compile kernels of cuda and rocm to machine code, without a GPU (x86-64; ALL=--hot: AMD's hot ones alone)
	$(BIN)/python tools/compile/compile.py --workers $(WORKERS) $(ALL)

compile-kernels-check: $(INSTALLED) ## compile nothing: what compile-kernels leaves out of the whole, and whether the whole's result is stale
	$(BIN)/python tools/compile/compile.py --workers $(WORKERS) --check

compile-kernels-whole: $(INSTALLED) ## the whole product of scenes and chips; goes on where it was stopped (build/compile-kernels)
	nice -n 10 $(BIN)/python tools/compile/compile.py --workers $(WORKERS) --whole $(ALL)

drift-corpus: $(INSTALLED) ## the checker against published releases with known faults (downloads wheels)
	$(BIN)/python benchmarks/drift_corpus.py

drift-fuzz: $(INSTALLED) ## the checker over large packages of the field: it must not fail inside (downloads wheels)
	nice -n 10 $(BIN)/python benchmarks/drift_fuzz.py --output benchmarks/results/drift_fuzz.json

test-vllm: ## the vLLM plugin in an environment of its own (3.4 GB)
	PYTHON=$(PYTHON) tools/test_vllm.sh

engines-gpu: ## both engines' plugins inside served engines on this machine's GPU, and their speed against stock
	PYTHON=$(PYTHON) tools/engines_gpu.sh

gpu-suite: ## the tests, kit and benchmarks of this machine's GPU; results in build/gpu-suite
	$(PYTHON) tools/gpu_suite.py --out build/gpu-suite

test-sglang: ## the SGLang plugin in an environment of its own
	PYTHON=$(PYTHON) tools/test_sglang.sh

# A folder per version, in front of the installed pluggy on the import path: pytest itself then runs on it too.
pluggy-matrix: $(INSTALLED) ## the registry's tests with every supported pluggy
	for version in $(PLUGGY_VERSIONS); do \
	  folder=$(VENV)/pluggy-$$version; \
	  test -d $$folder || $(PIP) install --quiet --no-deps --target $$folder pluggy==$$version || exit 1; \
	  PYTHONPATH=$$folder $(BIN)/python -c "import pluggy; assert pluggy.__version__ == '$$version', pluggy" || exit 1; \
	  echo "pluggy $$version:"; \
	  PYTHONPATH=$$folder $(BIN)/python -m pytest -q -p no:cacheprovider tests/registry/test_registry_*.py || exit 1; \
	done

mutants: $(INSTALLED) ## every deliberately wrong backend through the conformance kit's quick lane; keeps the result
	$(BIN)/python -m tests.conformance.run_mutants --out benchmarks/results/conformance-mutants.json

example-vendor: $(INSTALLED) ## the example backend from its own wheel, in an environment without this tree: the quick lane
	$(BIN)/python -m pytest -q -m slow tests/conformance/test_example_vendor.py -k "not certified"

certify-example: $(INSTALLED) ## as above, the whole kit
	$(BIN)/python -m pytest -q -m slow tests/conformance/test_example_vendor.py -k certified

certificates: $(INSTALLED) ## the whole kit on the backends that need no device; keeps a summary of each
	$(BIN)/python tools/certificates.py

clean: ## remove the environment and the caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
