"""labutils: what the four training-optimisation notebooks share.

Names load on first use, so importing is free. `__init__.pyi` is the list, for Python and for
editors. A name that says little by itself is reached through its module: `lab.allocator.Settings`.
"""

import os

import lazy_loader

__version__ = "0.1.0"
# Torch's C++ code would write to stderr whenever CUDA runs out of memory, caught or not, and the
# profiler about freed blocks. Torch reads this when it is imported: so a script or notebook imports
# labutils before torch.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# So that a step takes the same bytes in every torch: before 2.13 cuBLASLt has a workspace beside
# cuBLAS's, and from 2.15 on a workspace is given back after each product.
os.environ.setdefault("TORCH_CUBLASLT_UNIFIED_WORKSPACE", "1")
os.environ.setdefault("TORCH_CUBLAS_WORKSPACE_CACHE", "1")

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
