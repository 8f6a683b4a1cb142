# Each target sets up what it needs in .venv the first time, and finds it there afterwards.
# Wanted from the machine: make, and a Python 3.11 or newer with venv and pip.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python

# A stamp says that a set-up came to its end. It is older than these files when they have changed.
DEMO_STAMP := $(VENV)/.ready-demo
DEV_STAMP := $(VENV)/.ready-dev
INPUTS := pyproject.toml constraints.txt src/hdnn/_version.py

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test coverage lint format docs package release-check fresh-check clean distclean

help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(DEMO_STAMP) ## train a 64-layer H2 network on the Swiss roll; ARGS="--help" shows its options
	@$(PY) -m hdnn demo $(ARGS)

# Tests start hundreds of processes, which are quicker if Python may keep its bytecode.
test: $(DEV_STAMP) ## run the tests; ARGS="-k name" picks some
	@PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n auto --maxprocesses=4 --hypothesis-profile=reproducible $(ARGS)

coverage: $(DEV_STAMP) ## the same, and which lines they reach, which takes a third longer
	@$(MAKE) --no-print-directory test ARGS="--cov $(ARGS)"

lint: $(DEV_STAMP) ## check style, formatting, types, size, and who imports whom
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(PY) -m pyright
	@$(VENV)/bin/lint-imports --no-cache
	@$(PY) tests/size.py

format: $(DEV_STAMP) ## mend what ruff can mend, and format
	@$(PY) -m ruff check --fix-only
	@$(PY) -m ruff format

docs: $(DEV_STAMP) ## build the site into site/; whatever it warns of is an error
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

package: $(DEV_STAMP) ## build wheel and source distribution into dist, and check them
	@rm -rf dist
	@$(PY) -m build --no-isolation --outdir dist
	@$(PY) -m twine check --strict dist/*

release-check: package ## install that wheel in an empty environment, use it there, and check its types
	@$(PY) tests/release/check_install.py dist/*.whl

fresh-check: ## what a newcomer does: the two commands in a new clone, with an empty HOME and no caches
	@tests/release/fresh_clone.sh

clean: ## remove caches and build output; results in runs/ stay
	@rm -rf build dist site .coverage .coverage.* htmlcov .pytest_cache .ruff_cache .hypothesis
	@find src tests -type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## the same, and the environment
	@rm -rf $(VENV)

# What the demo needs is part of what the tests need: the second set-up counts for both.
$(DEMO_STAMP): $(INPUTS)
	$(call set-up,the demo,cli$(comma)plot$(comma)fast,$(DEMO_STAMP))

$(DEV_STAMP): $(INPUTS)
	$(call set-up,tests$(comma) linters and the site,dev$(comma)docs$(comma)cli$(comma)plot$(comma)export$(comma)fast$(comma)gpu$(comma)graph$(comma)hub$(comma)sklearn$(comma)tensorboard,$(DEMO_STAMP) $(DEV_STAMP))

comma := ,
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check -qq -c constraints.txt

# $(call set-up,what for,extras,stamps). The marker stays behind when a set-up is broken off, even
# by a kill: packages may then lie there by halves, so the next one starts from nothing. PyTorch
# goes first and by itself, so that its pin alone decides which build is taken.
define set-up
@set -e; \
command -v "$(PYTHON)" >/dev/null || { \
	echo "hdnn needs Python 3.11 or newer, and there is no $(PYTHON) here: name yours, as in make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	echo "hdnn needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1): name another, as in make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }; \
"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	echo "$(PYTHON) has no venv module: install it (on Debian and Ubuntu the package python3-venv) and run make $(MAKECMDGOALS) again" >&2; exit 1; }; \
echo "Setting up $(VENV) for $(1) (once, a minute or two)"; \
rm -f $(3); \
if [ -e $(VENV)/.setting-up ] || ! $(PY) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	echo "  a new environment, by $$("$(PYTHON)" --version)"; \
	rm -rf $(VENV); mkdir $(VENV); touch $(VENV)/.setting-up; \
	"$(PYTHON)" -m venv $(VENV); \
fi; \
touch $(VENV)/.setting-up; \
echo "  PyTorch"; \
$(PIP_INSTALL) torch; \
echo "  hdnn[$(2)]"; \
$(PIP_INSTALL) -e '.[$(2)]'; \
rm $(VENV)/.setting-up; \
touch $(3)
endef
