# `make demo` and `make test` set up all they need in .venv; see README.md.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-0.18 test-gpu lint clean
.DEFAULT_GOAL := demo

# te-source: Transformer Engine's Python, which tests read (tests/te_python.py). It is not installed:
# without its compiled parts Megatron could not use it, and would try.
$(STAMP): pyproject.toml requirements/tested.txt scripts/find_python.sh
	@python=$$(PYTHON="$(PYTHON)" sh scripts/find_python.sh) || exit 1; \
	echo "setting up $(VENV) with $$python"; \
	"$$python" -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint requirements/tested.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--constraint requirements/tested.txt --target $(VENV)/te-source transformer-engine
	@touch $@

## Train a small GPT on this machine's CPU twice, without and with TACO, and compare.
demo: $(STAMP)
	$(BIN)/python scripts/demo.py

## The CPU test suite.
test: $(STAMP)
	$(BIN)/python -m pytest

## The tests that meet Megatron on the other supported release, megatron-core 0.18.
test-0.18: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target $(VENV)/megatron-0.18 megatron-core==0.18.2
	PYTHONPATH=$(CURDIR)/$(VENV)/megatron-0.18 $(BIN)/python -c \
		"import megatron.core as m; assert m.__version__.startswith('0.18'), m.__version__"
	PYTHONPATH=$(CURDIR)/$(VENV)/megatron-0.18 $(BIN)/python -m pytest tests/distributed \
		tests/unit/test_registry_megatron.py tests/unit/test_megatron_args.py \
		tests/unit/test_megatron_options.py tests/unit/test_doctor.py

## The tests that need a GPU, with the Python that has CUDA's torch.
test-gpu:
	$(or $(PYTHON),$(BIN)/python) -m pytest tests/gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile Dockerfile.cpu

clean:
	rm -rf $(VENV) build *.egg-info
