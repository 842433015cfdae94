"""Repair without training: closed-form corrections, layer by layer."""

from secateur.repair.corrections import (
    NOTHING,
    Change,
    Correction,
    Mean,
    Norm,
    Nothing,
    Ridge,
    known_corrections,
    register_correction,
)
from secateur.repair.layerwise import Outcome
from secateur.repair.moments import Moments, Regression
from secateur.repair.samples import crop_and_flip
from secateur.repair.session import Repair, Session, repair

__all__ = [
    "NOTHING",
    "Change",
    "Correction",
    "Mean",
    "Moments",
    "Norm",
    "Nothing",
    "Outcome",
    "Regression",
    "Repair",
    "Ridge",
    "Session",
    "crop_and_flip",
    "known_corrections",
    "register_correction",
    "repair",
]
