"""One row for each value that a config can name: its facts, and the words that explain it.

All other code asks the row. A name that has no row raises ValueError here, and nowhere else. The
comments in `configs/*.yaml`, and `configs/schema.json`, say what the rows say: a test compares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


class Rows(dict):
    """Rows of one kind, by name. Asking for a name that has none raises ValueError."""

    def __init__(self, kind: str, *rows) -> None:
        super().__init__((row.name, row) for row in rows)
        self.kind = kind

    def __missing__(self, name: object):
        raise ValueError(f"{name!r} is not one of the {self.kind}: {', '.join(self)}")


@dataclass(frozen=True)
class Choice:
    """A value without further facts. `help` stands behind its name in the YAML files."""

    name: str
    help: str = ""


@dataclass(frozen=True)
class Precision:
    """How numbers are stored and multiplied. Dtypes are torch's names for them."""

    name: str
    help: str = ""
    products: str = "float32"  # dtype of the inputs of matrix products
    weights: str = "float32"  # dtype of weights, gradients and residual stream
    autocast: bool = False
    loss_scale: bool = False  # needs a GradScaler
    tf32: bool = False  # float32 products round their inputs to TF32
    fast_since: tuple[int, int] = (0, 0)  # NVIDIA compute capability with hardware for it
    not_on_cpu: str = ""  # why a CPU cannot
    without_hardware: str = ""  # what an older card lacks
    runs_without_hardware: bool = True  # slowly

    @property
    def is_16bit(self) -> bool:
        """Whether products are of 16-bit numbers."""
        return self.products != "float32"

    @property
    def kind(self) -> str:
        """The kind of its products, as datasheets list their rates."""
        return "TF32" if self.tf32 else self.products


BF16 = Precision(
    "bf16",
    products="bfloat16",
    autocast=True,
    fast_since=(8, 0),
    without_hardware="has no BF16 hardware: torch emulates it; fp16 is faster",
)
PRECISIONS = Rows(
    "precisions",
    Precision("fp32"),
    Precision(
        "tf32",
        tf32=True,
        fast_since=(8, 0),
        not_on_cpu="TF32 is a mode of NVIDIA tensor cores, Ampere (2020) or later; use fp32",
        without_hardware="has no TF32 (Ampere, 8.0, or later); use fp16",
        runs_without_hardware=False,
    ),
    Precision(
        "fp16",
        "with a GradScaler",
        products="float16",
        autocast=True,
        loss_scale=True,
        fast_since=(7, 0),
        without_hardware="has no tensor cores: FP16 saves no time",
    ),
    BF16,
    replace(BF16, name="pure_bf16", weights="bfloat16", autocast=False),
)
# A config may leave the choice between two rows to the card: see `precision_on`.
SIXTEEN_BIT = Choice("16bit", "bf16, else fp16")
WITH_BF16, WITHOUT_BF16 = BF16, PRECISIONS["fp16"]
NO_AUTOCAST = [row.name for row in PRECISIONS.values() if not row.is_16bit]


@dataclass(frozen=True)
class Optimizer:
    """An update rule, and what it keeps."""

    name: str
    help: str = ""
    moment_bits: int = 32  # of each number that it keeps
    is_adamw: bool = True


OPTIMIZERS = Rows(
    "optimizers",
    Optimizer("adamw"),
    Optimizer("adamw_bf16", moment_bits=16),
    Optimizer("adamw_8bit", "moments in fewer bytes", moment_bits=8),
    Optimizer("muon", "in blocks", is_adamw=False),
    Optimizer("sgd", is_adamw=False),
)
SMALLEST_STATE = OPTIMIZERS["adamw_8bit"]
OPTIMIZER_IMPLEMENTATIONS = Rows(
    "optimizer implementations",
    Choice("fused", "one kernel"),
    Choice("foreach", "a few, with temporaries"),
)


@dataclass(frozen=True)
class Attention:
    """A way to compute attention."""

    name: str
    help: str = ""
    keeps_matrices: bool = False  # (T, T) weights are kept for the backward pass
    since: tuple[int, int] = (0, 0)  # NVIDIA compute capability


ATTENTION = Rows(
    "kinds of attention",
    Attention("eager", "Hugging Face's", keeps_matrices=True),
    Attention("flash", since=(8, 0)),
    Attention("auto", "what torch prefers"),
)


@dataclass(frozen=True)
class Checkpointing:
    """What autograd keeps of GPT-2's blocks."""

    name: str
    help: str = ""
    blocks_per_unit: int = 1  # blocks between two inputs that are kept
    is_on: bool = True
    keeps_products: bool = False  # results of matrix products are not computed again
    to_host: bool = False  # what autograd keeps goes to the host's memory


CHECKPOINTING = Rows(
    "checkpointing policies",
    Checkpointing("none", is_on=False),
    Checkpointing("block", "computed again"),
    Checkpointing("every_2", "by twos", blocks_per_unit=2),
    Checkpointing("every_4", "by fours", blocks_per_unit=4),
    Checkpointing("selective", "keeps products", keeps_products=True),
    Checkpointing("offload", "to the host", to_host=True),
)
EACH_BLOCK = CHECKPOINTING["block"]


@dataclass(frozen=True)
class CompileMode:
    """A mode of torch.compile."""

    name: str
    help: str = ""
    is_on: bool = True
    spares_launches: bool = False  # by CUDA graphs; on a CPU by a wrapper in C++


COMPILE_MODES = Rows(
    "compile modes",
    CompileMode("off", is_on=False),
    CompileMode("default"),
    CompileMode(
        "reduce-overhead",
        "CUDA graphs; in C++ on a CPU",
        spares_launches=True,
    ),
)


GPT2_VOCABULARY = 50257


@dataclass(frozen=True)
class Model:
    """A GPT-2: its layers, attention heads, width, and the entries of its vocabulary."""

    name: str
    help: str
    n_layer: int
    n_head: int
    width: int
    vocabulary: int = GPT2_VOCABULARY
    is_published: bool = True  # trained weights exist


MODELS = Rows(
    "models",
    Model("gpt2-nano", "4 layers of 128", 4, 4, 128, vocabulary=2048, is_published=False),
    Model("gpt2", "124M", 12, 12, 768),
    Model("gpt2-medium", "", 24, 16, 1024),
    Model("gpt2-large", "", 36, 20, 1280),
    Model("gpt2-xl", "", 48, 25, 1600),
)
WEIGHTS = Rows(
    "weights",
    Choice("random"),
    Choice("pretrained", "GPT-2's own, from the model hub or its cache"),
)
SCHEDULES = Rows(
    "learning-rate schedules", Choice("constant"), Choice("cosine", "to a tenth of the rate")
)


@dataclass(frozen=True)
class Activation:
    """The nonlinearity of the feed-forward layers, by the name that transformers gives it."""

    name: str
    help: str
    in_transformers: str


ACTIVATIONS = Rows(
    "activations",
    Activation("gelu_new", "many small kernels", "gelu_new"),
    Activation("gelu_tanh", "the same function, fused", "gelu_pytorch_tanh"),
)
