BIN := .venv/bin
PYTHON ?= $(BIN)/python
ARGS ?=
PYTEST_ARGS ?=
TEST_PROCESSES ?= 3
CPU_WHEELS ?= --extra-index-url https://download.pytorch.org/whl/cpu
LOCK = $(BIN)/uv pip compile --quiet --upgrade --generate-hashes --no-header --no-annotate --extra otel \
  --python-version 3.11 --python-platform x86_64-manylinux_2_28 --index-strategy unsafe-best-match pyproject.toml
RUN_TESTS = env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES)

.DEFAULT_GOAL := help
.PHONY: help install serve test test-all test-costs test-releases pytest pytest-all lint lock pin sbom gpu-report clean

help:  ## Show what there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: .venv/.installed  ## Set up .venv with all that serving needs

serve: .venv/.installed  ## Serve the bundled model on 127.0.0.1:8000 (ARGS="--port 9000" for options)
	exec $(BIN)/tandem serve $(ARGS)

test: lint pytest  ## Run the checks and the fast tier of tests (PYTEST_ARGS="tests/router -k drain" to choose)

test-all: .venv/.compiled  ## Run the checks beside all tests, the randomized ones with fresh seeds
	$(MAKE) --jobs 2 lint pytest-all

test-costs: .venv/.compiled  ## Run all tests and write what they cost to tests/costs.json
	$(RUN_TESTS) --tier full --seed 0 --record-costs $(PYTEST_ARGS)

RELEASE_TESTS = engine checkpoints speculation quantization protocol costs gpu
test-releases:  ## Test the engine with the releases of PyTorch and Transformers that PYTHON has, but for Triton's interpreter
	env OMP_NUM_THREADS=1 $(PYTHON) -m pytest --tier full -rs -k "not interpreted" $(RELEASE_TESTS:%=tests/%) $(PYTEST_ARGS)

pytest: .venv/.compiled
	$(RUN_TESTS) --tier fast $(PYTEST_ARGS)

pytest-all: .venv/.compiled
	$(RUN_TESTS) --tier full $(PYTEST_ARGS)

lint: .venv/.installed-test  ## Run ruff, mypy, the import rules and the check of docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.plain_docstrings

lock: .venv/.installed-test  ## Write the versions and hashes of the images' packages
	$(LOCK) $(CPU_WHEELS) --no-emit-package nixl-cu13 deploy/requirements-cpu.in --output-file deploy/requirements-cpu.txt
	sed -i '1i --extra-index-url https://download.pytorch.org/whl/cpu' deploy/requirements-cpu.txt
	$(LOCK) --no-emit-package nixl-cu12 deploy/requirements-cuda.in --output-file deploy/requirements-cuda.txt

IMAGE_FILES = deploy/Dockerfile docker-compose.yml
pin:  ## Fix the foreign images of Dockerfile and Compose by the digests that their registries have now (needs docker buildx)
	for image in $$(sed -En '/tandem-serve/!s/^(FROM|    image:) ([^@]+)(@.*)?$$/\2/p' $(IMAGE_FILES)); do \
	  digest=$$(docker buildx imagetools inspect $$image | sed -n 's/^Digest: *//p') && test -n "$$digest" || exit; \
	  sed -Ei "s|($$image)(@.*)?$$|\1@$$digest|" $(IMAGE_FILES); \
	done

sbom: .venv/.installed-test  ## Write a CycloneDX SBOM of each image's Python packages: sbom-cpu.json, sbom-cuda.json
	for device in cpu cuda; do \
	  PYTHONWARNINGS=ignore $(BIN)/uvx --from cyclonedx-bom==7.5.0 cyclonedx-py requirements deploy/requirements-$$device.txt \
	    --pyproject pyproject.toml --output-reproducible --output-file sbom-$$device.json || exit; \
	done

FIRST_ON_GPU = kernels libraries products sampler verification

gpu-report:  ## On a GPU: test kernels, then write figures and checks to bench/results/gpu, in 10 minutes
	failed=0; $(PYTHON) -m pytest -n 4 -rs $(FIRST_ON_GPU:%=tests/gpu/test_%.py) || failed=1; \
	$(PYTHON) -m bench.gpu --size 0.6B --batch 1,16,64 --num-tokens 3 --chunk 512,2048,8192 $(ARGS) && exit $$failed

clean:  ## Remove the virtual environment and every cache
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

.venv/.installed: pyproject.toml deploy/install.sh
	deploy/install.sh

.venv/.installed-test: pyproject.toml deploy/install.sh
	deploy/install.sh test

# One process compiles what the tests import, or each of theirs would: for most of a minute.
.venv/.compiled: .venv/.installed-test
	-env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest --collect-only --quiet --tier fast > $@
