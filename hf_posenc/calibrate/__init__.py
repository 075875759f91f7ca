"""Which layers and pairs miss their rotation least: measuring it, and choosing by it."""

from hf_posenc.calibrate.calibration import Calibration

__all__ = ["Calibration"]
