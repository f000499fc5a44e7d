"""Peak rates of GPUs, for MFU and HFU. No torch."""

import re
from typing import Literal, NamedTuple


class DevicePeak(NamedTuple):
    """Dense matrix-product peak of one kind of GPU, in TFLOP/s."""

    name: str
    """regular expression of the whole device name, without NVIDIA and GeForce"""
    bfloat16: float
    """rate with float32 accumulation"""
    tf32: float
    float8: float
    """rate with float32 accumulation; 0: the chip has no unit for it"""
    source: str
    """data sheet or white paper that gives the rates"""


# FOOTGUN: data sheets print the figure with 2:4 sparsity, twice the dense one that is here. Names are matched whole: an
# H100 PCIe is not an H100, a laptop's or a MIG slice's peak is not the card's, an A100 of 64 GB is another chip.
DEVICE_PEAKS = (
    DevicePeak(r"A100-(SXM4?|PCIE)-[48]0GB|A100 80GB PCIe", 312, 156, 0, "NVIDIA A100 data sheet"),
    DevicePeak(r"A800-SXM4-80GB|A800 80GB PCIe", 312, 156, 0, "NVIDIA A800 data sheet"),
    DevicePeak(r"A40", 149.7, 74.8, 0, "NVIDIA A40 data sheet"),
    DevicePeak(r"A10", 125, 62.5, 0, "NVIDIA A10 data sheet"),
    DevicePeak(r"A10G", 70, 35, 0, "NVIDIA A10G data sheet (AWS)"),
    DevicePeak(r"H100 80GB HBM3", 989.5, 494.5, 1979, "NVIDIA H100 data sheet, SXM"),
    DevicePeak(r"H100 PCIe", 756.5, 378, 1513, "NVIDIA H100 data sheet of 2022, PCIe"),
    DevicePeak(r"H100 NVL", 835.5, 417.5, 1671, "NVIDIA H100 data sheet, NVL, one GPU"),
    DevicePeak(r"H800", 989.5, 494.5, 1979, "NVIDIA H800 data sheet, SXM"),
    DevicePeak(r"H200", 989.5, 494.5, 1979, "NVIDIA H200 data sheet, SXM"),
    DevicePeak(r"H200 NVL", 835.5, 417.5, 1671, "NVIDIA H200 data sheet, NVL"),
    DevicePeak(r"GH200 (480|144G)\w*( HBM3e)?", 989.5, 494.5, 1979, "NVIDIA GH200 data sheet"),
    DevicePeak(r"B200", 2250, 1125, 4500, "NVIDIA HGX B200 data sheet, an eighth"),
    DevicePeak(r"GB200", 2500, 1250, 5000, "NVIDIA GB200 NVL72 data sheet, one GPU"),
    DevicePeak(r"L4", 121, 60, 242.5, "NVIDIA L4 data sheet"),
    DevicePeak(r"L40", 181, 90.5, 362, "NVIDIA L40 data sheet"),
    DevicePeak(r"L40S", 362, 183, 733, "NVIDIA L40S data sheet"),
    DevicePeak(r"RTX A6000", 154.8, 77.4, 0, "NVIDIA RTX A6000 data sheet"),
    DevicePeak(r"RTX 6000 Ada Generation", 364.2, 182.1, 728.5, "NVIDIA Ada architecture white paper, appendix"),
    DevicePeak(r"RTX 3090", 71.2, 35.6, 0, "NVIDIA Ampere GA102 white paper, appendix A"),
    DevicePeak(r"RTX 4090", 165.2, 82.6, 330.3, "NVIDIA Ada architecture white paper, appendix A"),
    DevicePeak(r"RTX 5090", 209.5, 104.8, 419, "NVIDIA RTX Blackwell architecture white paper, appendix A"),
)


def device_peak_flops(name: str, precision: Literal["bfloat16", "tf32", "float8"]) -> float | None:
    """Return the dense peak of a GPU in FLOP/s by its driver's name for it.

    None if it is not in `DEVICE_PEAKS`, or has no unit for that precision.
    """
    bare = re.sub(r"^(NVIDIA )?(GeForce )?", "", name.strip())
    for peak in DEVICE_PEAKS:
        if re.fullmatch(peak.name, bare, re.IGNORECASE):
            teraflops: float = getattr(peak, precision)
            return teraflops * 1e12 or None
    return None
