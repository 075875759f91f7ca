"""Which layers and pairs miss their rotation least: measuring it, and choosing by it."""

from hf_posenc.calibrate.calibration import STATISTICS, Calibration
from hf_posenc.calibrate.compensation import compensate
from hf_posenc.calibrate.measure import calibrate
from hf_posenc.calibrate.search import SearchResult, plan_search
from hf_posenc.calibrate.text import calibration_rows

__all__ = [
    "STATISTICS",
    "Calibration",
    "SearchResult",
    "calibrate",
    "calibration_rows",
    "compensate",
    "plan_search",
]
