"""Write the files beside this one. Commit ac31f64 made them and its interface is used here: do not make them anew.

PYTHONPATH=<checkout of ac31f64>/src:tests python tests/regression/make.py
"""

import json
from contextlib import suppress

import secateur as sc
from test_regression import FILES, RUNS, network, numbers, pruned, samples

net = network()
sc.save(FILES / "model", sc.prune(net, samples(), keep={"macs": 0.5}, progress=False), about={"note": "ac31f64"})
for run in RUNS:
    with suppress(sc.SecateurError):
        pruned(run, FILES / f"{run}.safetensors", stop=3)  # steps 0, 1 and 2 are complete
    (FILES / f"{run}.json").write_text(json.dumps(numbers(pruned(run, None)[0])))
