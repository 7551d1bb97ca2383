"""What makes benchmarks, records and tables. It is not installed: run it from the repository.

| command | makes |
|---|---|
| `make bench` | several ways to train the same tokens, in turns: a table, and JSON in runs/ |
| `make records` | reference/convergence.csv, convergence_rates.csv and stability.csv, on any machine |
| `make exhibits` | NAME.json of the exhibits: words, data, a still; on any machine |
| `make mutants` | small faults, and which of them no test notices |
| `python benchmarks/neutrality.py COMMIT` | the answers in which this checkout and a commit differ |
| `make gpu` | what an NVIDIA GPU reserves, trains and needs for it, in four archives: `gpu.py` |
"""
