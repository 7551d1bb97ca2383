# make test: everything CI runs.   make labs: execute the notebooks on this machine, into runs/.   Both set themselves up.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2

.PHONY: labs test lint clean

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_OPTIONS) $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[lab,test]"
	touch $@

labs: $(VENV)/installed
	$(BIN)/python -m labutils labs

test: $(VENV)/installed lint
	$(BIN)/python -m pytest -q --durations=5
	@if $(BIN)/python -c "import torch; raise SystemExit(torch.backends.cpu.get_cpu_capability() == 'AVX2')"; \
	then echo "once more, capped to AVX2, like most laptops"; $(AVX2) $(BIN)/python -m pytest -q 0*.ipynb; \
	else echo "this CPU has AVX2 and no more: nothing to cap"; fi

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info
