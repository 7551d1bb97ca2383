"""One row for each card that times and bytes can be predicted for.

Memory is what torch sees, about. Peaks, bandwidth and multiprocessors: NVIDIA's datasheets and
architecture papers, dense. What operations reach was measured by others:
- products: github.com/zzc0721/torch-performance-test-data (database.md, the fastest of 1k to 10k);
  float32 on t4, v100-pcie, p100, a100, a100-40, h100 and l4: github.com/sitar-lab/NeuSight
  (linear.csv above 100 GFLOP, the upper quartile). h200 in TF32: taken to be like h100;
  v100-pcie and rtx4090 in 16 bits: github.com/chsasank/device-benchmarks.
- shares of the bandwidth: NeuSight's elem.csv, ln.csv and softmax.csv, medians; on rtx3090, rtx4090
  and h100-pcie a copy, github.com/chsasank/device-benchmarks.
- flash attention, heads of 64, 1,024 tokens: h100 Dao-AILab/flash-attention#2688, b200 its #1589;
  where consumer cards multiply 16-bit numbers at half rate an A5000, gpu-mode/ring-attention#10.
  All others: assumed, inside the 50 to 73 % of an A100's peak that arXiv 2307.08691 reports.
"""

from __future__ import annotations

from labutils.config.card import Card, Gpu, Speed
from labutils.config.choices import Rows


def _speed(
    gb_per_s: float,
    float32: float,
    tf32: float | None = None,
    sixteen: float | None = None,
    *,
    bfloat16: bool = True,
    reached: dict[str, float] | None = None,
    **shares,
) -> Speed:
    """Return a card's speed from its datasheet: 10^9 bytes/s, and TFLOP/s of each kind."""
    tflops = {"float32": float32}
    if tf32:
        tflops["TF32"] = tf32
    if sixteen:
        tflops["float16"] = sixteen
    if sixteen and bfloat16:
        tflops["bfloat16"] = sixteen
    return Speed(tflops, gb_per_s, reached or {}, **shares)


def _reached(
    float32: float, tf32: float = 0, float16: float = 0, bfloat16: float = 0
) -> dict[str, float]:
    kinds = {"float32": float32, "TF32": tf32, "float16": float16, "bfloat16": bfloat16}
    return {kind: tflops for kind, tflops in kinds.items() if tflops}


ADA = (0.80, 0.62)  # flash attention where tensor cores are slow beside the rest of the chip
HOPPER, BLACKWELL = (0.37, 0.30), (0.21, 0.165)

CARDS = Rows(
    "cards",
    Card(
        "t4",
        14.6,
        Gpu((7, 5), 40, 1024),
        speed=_speed(
            320,
            8.1,
            sixteen=65,
            bfloat16=False,
            reached=_reached(4.05, 0, 42, 2.2),
            elements=0.74,
            rows=0.52,
        ),
    ),
    Card(
        "v100",
        31.7,
        Gpu((7, 0), 80, 2048),
        speed=_speed(
            900,
            15.7,
            sixteen=125,
            bfloat16=False,
            reached=_reached(14.1, 0, 95, 10.3),
            elements=0.90,
        ),
    ),
    Card(
        "v100-pcie",
        31.7,
        Gpu((7, 0), 80, 2048),
        speed=_speed(
            900,
            14.0,
            sixteen=112,
            bfloat16=False,
            reached=_reached(13.8, 0, 84),
            elements=0.90,
        ),
    ),
    Card(
        "p100",
        15.9,
        Gpu((6, 0), 56, 2048),
        speed=_speed(
            732,
            9.3,
            sixteen=18.7,
            bfloat16=False,
            reached=_reached(7.0, 0, 8.4),
            elements=0.74,
            rows=0.45,
        ),
    ),
    Card(
        "rtx2080ti",
        10.7,
        Gpu((7, 5), 68, 1024),
        speed=_speed(616, 13.4, sixteen=53.8, bfloat16=False, reached=_reached(13.0, 0, 58.6, 7.3)),
    ),
    Card("a30", 23.5, Gpu((8, 0), 56, 2048), speed=_speed(933, 10.3, 82, 165, is_calibrated=False)),
    Card(
        "a100",
        79.2,
        Gpu((8, 0), 108, 2048),
        speed=_speed(
            2039, 19.5, 156, 312, reached=_reached(17.9, 0, 262, 262), elements=0.86, rows=0.62
        ),
    ),
    Card(
        "a100-40",
        39.4,
        Gpu((8, 0), 108, 2048),
        speed=_speed(
            1555, 19.5, 156, 312, reached=_reached(16.3, 108, 238, 238), elements=0.88, rows=0.65
        ),
    ),
    Card(
        "a6000",
        47.5,
        Gpu((8, 6), 84, 1536),
        speed=_speed(768, 38.7, 77.4, 155, reached=_reached(24, 0, 122, 122), flash=ADA),
    ),
    Card(
        "l4",
        22.0,
        Gpu((8, 9), 58, 1536),
        speed=_speed(
            300,
            30.3,
            60,
            121,
            reached=_reached(9.0, 32, 70, 70),
            elements=0.78,
            rows=0.78,
            flash=ADA,
        ),
    ),
    Card(
        "l40s",
        44.4,
        Gpu((8, 9), 142, 1536),
        speed=_speed(864, 91.6, 183, 362, reached=_reached(47, 0, 267, 267), flash=ADA),
    ),
    Card(
        "rtx2000ada",
        15.6,
        Gpu((8, 9), 22, 1536),
        speed=_speed(224, 12.0, 24, 48, is_calibrated=False, flash=ADA),
    ),
    Card(
        "rtx3060-laptop",
        5.8,
        Gpu((8, 6), 30, 1536),
        speed=_speed(336, 10.9, 21.8, 43.5, reached=_reached(7.8, 0, 25.9, 25.9), flash=ADA),
    ),
    Card(
        "rtx3090",
        23.6,
        Gpu((8, 6), 82, 1536),
        speed=_speed(
            936, 35.6, 35.6, 71, reached=_reached(24.8, 0, 76, 76), elements=0.89, flash=ADA
        ),
    ),
    Card(
        "rtx4060",
        7.6,
        Gpu((8, 9), 24, 1536),
        speed=_speed(272, 15.1, 15.1, 30.2, is_calibrated=False, flash=ADA),
    ),
    Card(
        "rtx4090",
        23.5,
        Gpu((8, 9), 128, 1536),
        speed=_speed(
            1008, 82.6, 82.6, 165.2, reached=_reached(54, 86, 165, 165), elements=0.90, flash=ADA
        ),
    ),
    Card(
        "rtx5090",
        31.4,
        Gpu((12, 0), 170, 1536),
        speed=_speed(1792, 104.8, 104.8, 209.5, reached=_reached(67, 122, 236, 236), flash=ADA),
    ),
    Card(
        "h100",
        79.1,
        Gpu((9, 0), 132, 2048),
        speed=_speed(3350, 66.9, 494.7, 989.4, reached=_reached(50.9, 402, 790, 790), flash=HOPPER),
    ),
    Card(
        "h100-pcie",
        79.1,
        Gpu((9, 0), 114, 2048),
        speed=_speed(2039, 51, 378, 756, reached=_reached(37, 240, 496, 496), flash=HOPPER),
    ),
    Card(
        "h200",
        139.8,
        Gpu((9, 0), 132, 2048),
        speed=_speed(4800, 66.9, 494.7, 989.4, reached=_reached(51, 402, 790, 790), flash=HOPPER),
    ),
    Card(
        "b200",
        178.4,
        Gpu((10, 0), 148, 2048),
        speed=_speed(8000, 75, 1125, 2250, reached=_reached(66, 0, 1696, 1696), flash=BLACKWELL),
    ),
)
