# make labs:      execute the four notebooks on this machine, into runs/. make further: the optional ones.
# make test:      the gate: lint, unit tests, and the four notebooks once.
# make test-all:  what the gate leaves out and 35 minutes have room for. make test-slow: the rest.
# make mutants:   200 small faults, one at a time: which does no test notice? 90 minutes.
# make types:     mypy; its errors may become fewer, and never more.
# make readme:    the README's pictures and table: out of notebook 01, and of what cards
#                 measured; and docs/what_it_saves.md.
# make site:      pages of all notebooks as they are committed, and the exhibits, into site/;
#                 RUNS=runs: with what make labs has written there.
# make bench:     several ways to train the same tokens, in turns.
# make records:   the CSVs of long runs in labutils/reference/, on any machine; hours.
# make exhibits:  the data, words and stills of lab.play, on any machine, in a minute. After a change
#                 of the prediction: make exhibits AGAIN=--again, 20 minutes; it can be continued.
# make gpu:       on a machine with an NVIDIA GPU: four parts, recorded in runs/gpu/; PARTS=bench
#                 is one of them. What is done is not done again. Then, anywhere, for the archive:
#                 python -m benchmarks.gpu --take runs/gpu/records.tar.gz  (records into
#                 labutils/reference/, executed notebooks into benchmarks/cards/)
# make wheels:    for a GPU without a network: packages for its Python, into wheels/. There:
#                 make gpu GPU_PYTHON=python3 WHEELS=wheels LIMIT=540
# All set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# Two processes with a thread each: threads that wait for each other's are slower than none.
TWO_AT_ONCE := OMP_NUM_THREADS=1
PYTEST = $(BIN)/python -m pytest -q --durations=5
REFERENCE := labutils/reference
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

.PHONY: labs further test test-all test-further test-avx2 test-more test-slow lint types mutants
.PHONY: readme site configs exhibits bench records gpu wheels clean
.NOTPARALLEL: # one card: what runs beside it would change its times

# torch's build, as download.pytorch.org names it: TORCH=cpu, cu130, rocm7.1; pip: what pip finds.
# Where no NVIDIA GPU is seen it is cpu, because on Linux pip would find CUDA's, of several GB.
GPU_SEEN = $(shell nvidia-smi -L 2>/dev/null | grep "^GPU ")$(wildcard /dev/nvidiactl)
ifneq ($(origin TORCH),command line)
TORCH = $(if $(GPU_SEEN),pip,cpu)
endif
TORCH_INDEX = https://download.pytorch.org/whl/$(TORCH)
# One attempt. A build that was asked for is needed; else a course with another one beats none.
TAKE_TORCH = @$(BIN)/python -m pip install -q --no-deps --retries 0 --timeout 10 \
	--index-url $(TORCH_INDEX) $(shell grep ^torch== constraints.txt) \
	$(if $(filter file,$(origin TORCH)),|| echo "no torch from $(TORCH_INDEX): pip takes what it finds")

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(filter pip,$(TORCH)),,$(TAKE_TORCH))
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[lab,test,frameworks]"
	@$(BIN)/python -c "import torch; print(f'torch {torch.__version__} (make clean labs TORCH=… takes another)')"
	touch $@

labs: $(VENV)/installed
	$(BIN)/python -m labutils labs

further: $(VENV)/installed
	$(BIN)/python -m labutils labs $(wildcard further/*.ipynb)

# What the gate leaves out is said in pyproject.toml.
test: $(VENV)/installed lint
	$(TWO_AT_ONCE) $(PYTEST) -n 2 --dist loadfile

test-all: test-further test-avx2 test-more

test-further: $(VENV)/installed
	$(TWO_AT_ONCE) $(PYTEST) -n 2 --dist loadfile further/*.ipynb

# With as many threads as a reader has: the outputs that are compared depend on neither.
test-avx2: $(VENV)/installed
	@if $(BIN)/python -c "import torch; \
	raise SystemExit(torch.backends.cpu.get_cpu_capability() == 'AVX2')"; \
	then echo "the four notebooks once more, capped to AVX2, like most laptops"; \
	$(AVX2) $(PYTEST) 0*.ipynb; \
	else echo "this CPU has AVX2 and no more: nothing to cap"; fi

# prettier and axe-core, in their pinned versions, for tests of the exhibits
NPM := tests/exhibits/node_modules/.package-lock.json
$(NPM): tests/exhibits/package-lock.json
	if command -v npm >/dev/null; then npm ci --silent --prefix tests/exhibits; \
	else echo "no npm: prettier and axe are skipped"; fi

test-more: $(VENV)/site $(NPM)
	if [ -f $(NPM) ]; then $(dir $(NPM)).bin/prettier --config tests/exhibits/package.json \
	--check labutils/course/exhibits/*.js labutils/course/exhibits/*.css docs/*.css; fi
	$(TWO_AT_ONCE) $(PYTEST) -n 2 --dist loadfile -m "slow and not slowest" tests

test-slow: $(VENV)/installed
	$(TWO_AT_ONCE) $(PYTEST) -n 2 --dist load -m slowest tests

mutants: $(VENV)/installed
	$(TWO_AT_ONCE) $(BIN)/python -m benchmarks.mutants

readme: $(VENV)/installed
	$(BIN)/python -m benchmarks.card_tables
	$(BIN)/python -m benchmarks.readme_figure

# Sphinx and its theme, which nothing else needs
$(VENV)/site: $(VENV)/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[site]"
	touch $@

RUNS ?=
site: $(VENV)/site
	RUNS=$(RUNS) $(BIN)/python -m sphinx -c docs . site
	@rm -rf jupyter_execute  # myst-nb's, of no use here
	@echo "wrote site/index.html"

configs: $(VENV)/installed
	$(BIN)/python -m benchmarks.configs

exhibits: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.exhibits $(AGAIN)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

# Whoever mends some lowers the number.
TYPE_ERRORS := 163
types: $(VENV)/installed
	@answer="$$($(BIN)/mypy)" || [ $$? -eq 1 ] || { echo "$$answer"; exit 1; }; \
	n=$$(echo "$$answer" | grep -c ": error: "); \
	if [ $$n -gt $(TYPE_ERRORS) ]; then echo "$$answer"; \
	echo "mypy has $$n errors; TYPE_ERRORS in the Makefile allows $(TYPE_ERRORS)"; exit 1; fi; \
	if [ $$n -lt $(TYPE_ERRORS) ]; then echo "lower TYPE_ERRORS in the Makefile to $$n"; fi

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks.bench

records: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.records convergence rates stability unscaled

# A Python that is there already, with torch: GPU_PYTHON=python3. LIMIT: seconds for each part.
GPU_PYTHON ?= $(BIN)/python
LIMIT ?= 0
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/installed)
	$(if $(WHEELS),$(GPU_PYTHON) -m pip install -q --no-index --find-links $(WHEELS) --upgrade \
	--target runs/gpu/site $(MAY_LACK))
	$(GPU_PYTHON) -m benchmarks.gpu $(PARTS) --limit $(LIMIT)

# What a Python with torch, transformers, pandas and pytest may lack, for Linux on x86-64.
MAY_LACK := pydantic ipykernel nbclient
WHEELS_FOR ?= 3.12
PLATFORMS := manylinux_2_28_x86_64 manylinux_2_17_x86_64 manylinux2014_x86_64
wheels:
	$(PYTHON) -m pip download -q -c constraints.txt -d wheels --only-binary=:all: \
	--implementation cp --python-version $(WHEELS_FOR) $(PLATFORMS:%=--platform %) $(MAY_LACK)

clean:
	rm -rf $(VENV) build *.egg-info
