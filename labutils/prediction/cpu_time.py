"""How long this CPU computes one operation, from single operations measured on it."""

from __future__ import annotations

from labutils.memory.kinds import ATTENTION_KINDS, BATCHED, ELEMENTS, PRODUCT
from labutils.prediction.calibrate import cpu_rates
from labutils.prediction.work import Work


class CpuTime:
    """Seconds of operations on this CPU."""

    def __init__(self, is_compiled: bool) -> None:
        self.rates = cpu_rates()
        self.is_compiled = is_compiled
        self.call_seconds = self.compiled_call_seconds = self.rates.call_seconds

    def seconds(self, work: Work) -> float:
        """Return how long one operation computes, without the cost of its call."""
        rates = self.rates
        if work.kind == PRODUCT:
            products = rates.products.get(work.dtype, rates.products["float32"])
            return products.at(work.flops)
        if work.kind == BATCHED:
            return rates.batched.at(work.flops)
        if work.kind in ATTENTION_KINDS:
            return rates.attention.at(work.flops)
        # a compiler spares traffic; what takes time for its arithmetic goes on taking it
        is_fused = self.is_compiled and work.kind == ELEMENTS
        return rates.kinds[work.kind].at(work.fused_bytes if is_fused else work.n_bytes)
