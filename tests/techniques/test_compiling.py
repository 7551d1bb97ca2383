import shutil
from functools import partial
from unittest.mock import Mock

import pytest
import torch

import labutils as lab
from labutils.techniques import compiling
from labutils.techniques.compiling import CompiledLoss
from tests.helpers import CPU, TINY, slow

NO_COMPILER = not (shutil.which("g++") or shutil.which("clang++"))


def batch():
    return dict.fromkeys(("input_ids", "labels"), torch.arange(48).view(2, 24))


def failing(text):
    """Return a `torch.compile` whose code raises at its first call."""
    error = torch._dynamo.exc.BackendCompilerFailed("inductor", RuntimeError(text), None)
    return lambda loss_fn, **_: Mock(side_effect=error)


def loss_and_gradient(loss_fn):
    model = lab.build_model(n_layer=1, dropout=0.0, activation="gelu_tanh", pad_vocab=True)
    loss = loss_fn(model, batch())
    loss.backward()
    return loss.item(), lab.flat_gradient(model)


@slow
@pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler here")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_loss_and_gradients_are_the_eager_ones(mode):
    compiled = CompiledLoss(partial(lab.lm_loss_sum, chunk_tokens=16), mode, CPU)
    loss, gradient = loss_and_gradient(compiled)
    assert compiled.report == mode, "nothing was compiled"
    expected, expected_gradient = loss_and_gradient(lab.lm_loss_sum)
    assert loss == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=2e-5)


def test_without_a_compiler_it_runs_eagerly_and_says_so(monkeypatch, tmp_path):
    # else what another run has compiled is found
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    with torch._inductor.config.patch({"cpp.cxx": ("/nowhere/g++",), "fx_graph_cache": False}):
        compiled = CompiledLoss(lab.lm_loss_sum, "default", CPU)
        assert loss_and_gradient(compiled)[0] == loss_and_gradient(lab.lm_loss_sum)[0]
    assert "eagerly, since" in compiled.report and "No working C++ compiler" in compiled.report
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        # Triton's
        ("Failed to find C compiler. Use CC\nmore", "Failed to find C compiler. Use CC"),
        (
            "C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\n"
            "/tmp/x.cpp:3:10: fatal error: omp.h: No such file\nx.cpp:9: error: more",
            "C++ compile error: omp.h: No such file",
        ),
    ],
)
def test_the_reason_is_what_the_backend_raised_not_that_it_did(monkeypatch, text, reason):
    monkeypatch.setattr(compiling.torch, "compile", failing(text))
    compiled = CompiledLoss(lambda model, batch: torch.ones(()), "default", CPU)
    assert compiled(None, None) == 1
    assert compiled.report == f"eagerly, since compiling failed: RuntimeError: {reason}"


def test_what_the_model_raises_is_not_hidden():
    def broken(model, batch):
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        CompiledLoss(broken, "default", CPU)(lab.build_model(n_layer=1), batch())


@pytest.mark.parametrize("mode", ["default", "off"])
def test_a_run_records_how_it_was_compiled(mode, runs, monkeypatch):
    monkeypatch.setattr(compiling.torch, "compile", lambda loss_fn, **_: loss_fn)
    record = lab.run_experiment(lab.load_config("fp32", **TINY, compile=mode), progress=False)
    assert record.environment.get("torch.compile", "off") == mode
    assert "not compiled" not in record.memory.method


def test_a_run_that_could_not_be_compiled_says_so_beside_its_bytes(runs, monkeypatch):
    monkeypatch.setattr(compiling.torch, "compile", failing("no"))
    record = lab.run_experiment(lab.load_config("fp32", **TINY, compile="default"), progress=False)
    assert record.environment["torch.compile"].startswith("eagerly")
    assert record.memory.method.endswith("not compiled")


def test_cuda_graphs_are_left_out_where_gradients_accumulate():
    for accumulates, mode in ((False, "reduce-overhead"), (True, "default")):
        where = torch.device("cuda")
        compiled = CompiledLoss(lab.lm_loss_sum, "reduce-overhead", where, accumulates)
        assert compiled.report == mode
