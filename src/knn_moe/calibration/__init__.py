"""A memory that calibrates itself on its own reference set."""

from knn_moe.calibration.build import build_calibrated
from knn_moe.calibration.choose import calibrate
from knn_moe.calibration.result import Calibration, write_calibrated
from knn_moe.calibration.settings import CalibrationConfig

__all__ = [
    "Calibration",
    "CalibrationConfig",
    "build_calibrated",
    "calibrate",
    "write_calibrated",
]
