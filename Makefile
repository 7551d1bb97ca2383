# make test: everything CI runs.   make labs: execute the notebooks on this machine, into runs/.   Both set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TWO_AT_ONCE := OMP_NUM_THREADS=1# two processes with a thread each: threads that wait for each other's are slower than none
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

.PHONY: labs test configs lint clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[lab,test]"
	touch $@

labs: $(VENV)/installed
	$(BIN)/python -m labutils labs

test: $(VENV)/installed lint
	$(TWO_AT_ONCE) $(BIN)/python -m pytest -q --durations=5 -n 2 --dist loadfile
	@if $(BIN)/python -c "import torch; raise SystemExit(torch.backends.cpu.get_cpu_capability() == 'AVX2')"; \
	then echo "once more, capped to AVX2, like most laptops"; $(AVX2) $(BIN)/python -m pytest -q 0*.ipynb; \
	else echo "this CPU has AVX2 and no more: nothing to cap"; fi

configs: $(VENV)/installed
	$(BIN)/python -m labutils.tools.configs

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info
