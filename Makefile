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
	$(AVX2) $(BIN)/python -m pytest -q 0*.ipynb

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build *.egg-info
