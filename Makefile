# make labs:      execute the four notebooks on this machine, into runs/. make further: the optional ones.
# make test:      the gate: lint, unit tests, and the four notebooks once.
# make test-all:  what the gate leaves out and 35 minutes have room for. make test-slow: the rest.
# make readme:    copy the README's figure out of notebook 01, as committed.
# make gpu:  on a machine with an NVIDIA GPU, run the GPU tests, the notebooks, a memory snapshot
#            and the benchmark. Their records, the snapshot, the benchmark's results and the
#            comparison of the ledger with the card land in labutils/reference/. A step that has
#            ended well is not run again: its stamp is in runs/gpu/. `make -k gpu` goes on after
#            a step that fails.
# make exhibits: compute what the tables of the exhibits lack, on any machine. It can be stopped
#            and continued. After a change of the prediction: make exhibits AGAIN=--again.
# All set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Two processes with a thread each: threads that wait for each other's are slower than none.
TWO_AT_ONCE := OMP_NUM_THREADS=1
PYTEST = $(BIN)/python -m pytest -q --durations=5
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

.PHONY: labs further test test-all test-busy test-further test-avx2 test-more test-slow lint
.PHONY: readme configs exhibits gpu gpu-is-here clean
.NOTPARALLEL: # one card: what runs beside it would change its times

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[lab,test,frameworks]"
	touch $@

labs: $(VENV)/installed
	$(BIN)/python -m labutils labs

further: $(VENV)/installed
	$(BIN)/python -m labutils labs $(wildcard further/*.ipynb)

# What the gate leaves out is said in pyproject.toml.
test: $(VENV)/installed lint
	$(TWO_AT_ONCE) $(PYTEST) -n 2 --dist loadfile

test-all: test-busy test-further test-avx2 test-more

# Alone: these tests keep every core busy on purpose, and notebooks time their steps.
test-busy: $(VENV)/installed
	$(PYTEST) -m busy tests

test-further: $(VENV)/installed
	$(TWO_AT_ONCE) $(PYTEST) -n 2 --dist loadfile further/*.ipynb

# With as many threads as a reader has: the outputs that are compared depend on neither.
test-avx2: $(VENV)/installed
	@if $(BIN)/python -c "import torch; \
	raise SystemExit(torch.backends.cpu.get_cpu_capability() == 'AVX2')"; \
	then echo "the four notebooks once more, capped to AVX2, like most laptops"; \
	$(AVX2) $(PYTEST) 0*.ipynb; \
	else echo "this CPU has AVX2 and no more: nothing to cap"; fi

test-more: $(VENV)/installed
	$(TWO_AT_ONCE) $(PYTEST) -n 2 --dist loadfile -m "(browser or processes or slow) and not slowest" tests

test-slow: $(VENV)/installed
	$(TWO_AT_ONCE) $(PYTEST) -n 2 --dist load -m slowest tests

readme: $(VENV)/installed
	$(BIN)/python benchmarks/readme_figure.py

configs: $(VENV)/installed
	$(BIN)/python -m labutils.tools.configs

exhibits: $(VENV)/installed
	OMP_NUM_THREADS=1 $(BIN)/python -m labutils.exhibits.ledger_table $(AGAIN)
	OMP_NUM_THREADS=1 $(BIN)/python -m labutils.exhibits.choose_table $(AGAIN)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# ---- make gpu

GPU := runs/gpu
REFERENCE := labutils/reference
NOTEBOOKS := $(patsubst %.ipynb,$(GPU)/%.done,$(wildcard 0*.ipynb))
LEDGER := model,precision,policy,batch,seq_len,predicted,measured,in_phase,measured_in,card,torch
BENCHES := $(addprefix $(GPU)/bench-,arms.done ablation.done scale.done)
BENCH_ablation := --ablate
BENCH_scale := --scale

gpu: $(GPU)/tests.done $(NOTEBOOKS) $(GPU)/snapshot.done $(BENCHES)

$(GPU)/tests.done: | gpu-is-here
	echo $(LEDGER) > $(GPU)/ledger.csv
	LABUTILS_LEDGER="$(CURDIR)/$(GPU)/ledger.csv" $(BIN)/python -m pytest -m gpu -v --tb=short tests
	cp $(GPU)/ledger.csv $(REFERENCE)/
	touch $@

$(NOTEBOOKS): $(GPU)/%.done: %.ipynb | gpu-is-here
	LABUTILS_RUNS="$(CURDIR)/$(GPU)" $(BIN)/python -m labutils labs $<
	cp $(GPU)/*-*-*-*.json $(REFERENCE)/
	touch $@

$(GPU)/snapshot.done: | gpu-is-here
	$(BIN)/python -m labutils.tools.bench.record_snapshot $(REFERENCE)
	touch $@

# In a folder of its own: reference_runs takes every other JSON file in reference/ for a run.
$(BENCHES): $(GPU)/bench-%.done: | gpu-is-here
	LABUTILS_RUNS="$(CURDIR)/$(REFERENCE)/bench" $(BIN)/python -m labutils bench $(BENCH_$*)
	touch $@

gpu-is-here: $(VENV)/installed-bench
	@mkdir -p $(GPU)
	@$(BIN)/python -c "from labutils.machine.gpu import choose_device as device; \
	raise SystemExit(device().type != 'cuda')" || \
	{ echo "no CUDA GPU can be used here: '$(BIN)/python -m labutils doctor' says why"; exit 1; }

$(VENV)/installed-bench: $(VENV)/installed
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
