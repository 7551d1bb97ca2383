from __future__ import annotations

import torch

import labutils as lab
from labutils.bench.loop_overhead import bare_steps, main
from tests.test_training import flat


def test_quick_bench_runs_and_reports_both_loops(capsys):
    assert main(quick=True) == 0
    printed = capsys.readouterr().out
    assert "bare ten-line loop" in printed and "ratio: median" in printed


def test_both_arms_do_the_same_work():
    weights = []
    for bare in (True, False):
        model = lab.build_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        stream = lab.batches(lab.load_corpus().split(32)[0], 2, 0)
        if bare:
            bare_steps(model, (next(stream) for _ in range(3)), optimizer, 1.0)
        else:
            lab.train(model, stream, lab.lm_loss_sum, optimizer, steps=3, max_grad_norm=1.0, progress=False)
        weights.append(flat(model))
    assert torch.allclose(*weights, atol=1e-7)
