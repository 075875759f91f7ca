"""Which layers and pairs miss their rotation least: measuring it, and choosing by it."""

from hf_posenc.calibration.compensation import compensate
from hf_posenc.calibration.measure import calibrate
from hf_posenc.calibration.record import STATISTICS, Calibration
from hf_posenc.calibration.search import SearchResult, plan_search
from hf_posenc.calibration.text import calibration_rows

__all__ = [
    "STATISTICS",
    "Calibration",
    "SearchResult",
    "calibrate",
    "calibration_rows",
    "compensate",
    "plan_search",
]
