"""A memory that calibrates itself on its own reference set."""

from knn_moe.calibration.build import build_calibrated
from knn_moe.calibration.calibrate import Calibration, CalibrationConfig, calibrate

__all__ = ["Calibration", "CalibrationConfig", "build_calibrated", "calibrate"]
