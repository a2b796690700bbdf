# Everything here works on a machine with Python >= 3.11, pip, venv and make: the first target that needs it makes .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Processes that share the tests, a file at a time; what a test draws depends on none of this (tests/conftest.py).
JOBS ?= 2
SHARED := -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Compiled modules are kept, whatever the environment says: every process of the tests would compile them again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo study docs reproduce test test-all browser lint conformance audit faults fuzz bad-input newcomer clean

help:
	@echo "make demo        train four private methods on real data, table and plots in demo-output/ (about a minute)"
	@echo "make study       a small grid of private runs on digits, figures in study-output/ (about ten minutes)"
	@echo "make reproduce   train a sample of published cells again and hold them to their tables (under ten minutes)"
	@echo "make docs        the documentation as a site in site/, links checked; open site/index.html"
	@echo "make newcomer    from the built wheel to a report on a table, in an empty folder (about two minutes)"
	@echo "make test        style, types, the release boundary, and the tests (about five minutes on two cores)"
	@echo "make browser     Debian's chromium, with which the tests of reports look at them (needs root; they are skipped without)"
	@echo "make test-all    the same with every case of every campaign (under an hour)"
	@echo "make conformance Opacus's own tests against our engine"
	@echo "make faults      kills, full disks and damaged files, counted into tests/reliability/faults.json (about ten minutes)"
	@echo "make fuzz        damaged files and random configurations, by coverage too (about fifteen minutes)"
	@echo "make bad-input   every bad argument that must be refused, counted into tests/reliability/"
	@echo "make audit       the privacy audit, and every seeded bug on every path, in tests/reliability/ (about ten minutes)"

$(READY): pyproject.toml constraints.txt
	@echo "== Setting up $(VENV) (once)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(READY)

demo: $(READY)
	@echo "== dpivon demo: private training on scikit-learn's digits, no network needed"
	$(BIN)/dpivon demo

study: $(READY)
	@echo "== dpivon study: 72 private runs on scikit-learn's digits; stop it as you like, the same command goes on"
	OMP_NUM_THREADS=1 $(BIN)/dpivon study run examples/study.yaml --out study-output
	$(BIN)/dpivon study report study-output

reproduce: $(READY)
	@echo "== Published cells again, on this machine: digits and tables; where CIFAR-10 is (DATA=FOLDER) and a GPU, the paper's CNN too"
	OMP_NUM_THREADS=1 $(BIN)/python -m experiments.reproduce $(if $(DATA),--parts tables quick steady check --data $(DATA))

docs: $(READY)
	@echo "== The documentation, into site/; a warning is an error"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(READY)
	@echo "== Style, types, and the release boundary"
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	@echo "== Tests (without the slow ones)"
	$(BIN)/python -m pytest -q $(SHARED) -m "not slow"

PATIENCE := -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 -o Acquire::Retries=1
browser:
	@if command -v chromium >/dev/null; then echo "== chromium is there"; \
	elif ! command -v apt-get >/dev/null; then echo "== No chromium: there is no apt-get here; the browser tests are skipped"; \
	elif [ "$$(id -u)" != 0 ]; then echo "== No chromium: run 'sudo make browser' to get it; the browser tests are skipped"; \
	else echo "== Installing chromium"; \
	{ apt-get $(PATIENCE) update -qq \
	  && DEBIAN_FRONTEND=noninteractive apt-get $(PATIENCE) install -y -qq --no-install-recommends chromium >/dev/null; } \
	|| echo "== No chromium: apt-get failed, see above; the browser tests are skipped"; fi

test-all: lint
	@echo "== All tests"
	$(BIN)/python -m pytest -q $(SHARED)

conformance: $(READY)
	@echo "== Opacus's own tests against dpivon.PrivacyEngine"
	CONFORMANCE_EXAMPLES=20 $(BIN)/python -m pytest -q -s tests/conformance

faults: $(READY)
	@echo "== Faults: real processes killed at random and in every write, a full disk, damaged files"
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/fault_campaign.py --kills 50 --aimed 2 --flips 200 --out tests/reliability/faults.json
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/fault_tests.py --out tests/reliability/fault-tests.json

fuzz: $(READY)
	@echo "== Damaged files and random configurations: success or one of our errors"
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt '.[fuzz]'
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz --examples 3000 --seconds 30 --out tests/reliability/fuzz.json

bad-input: $(READY)
	@echo "== Bad arguments, refused"
	OMP_NUM_THREADS=1 $(BIN)/python tests/count_bad_input.py --out tests/reliability/bad-input.json

audit: $(READY)
	@echo "== The audit of the library as it is, and with every bug sown into it"
	OMP_NUM_THREADS=1 $(BIN)/python tests/audit/make_matrix.py --out tests/reliability

newcomer: $(READY)
	PYTHON=$(PYTHON) bash tests/newcomer.sh

clean:
	rm -rf $(VENV) demo-output study-output site dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
