"""A memory that calibrates itself on its own reference set."""

from knn_moe.calibration.choose import Calibration, CalibrationConfig, calibrate

__all__ = ["Calibration", "CalibrationConfig", "calibrate"]
