"""Criteria: ways to score units, by name or as objects with settings."""

from secateur.criteria.attribution import Captum, Custom
from secateur.criteria.criterion import Accumulator, Criterion, Subject
from secateur.criteria.registry import known_criteria, register_criterion
from secateur.criteria.relevance import LRP
from secateur.criteria.sensitivity import Activation, Gradient, Taylor
from secateur.criteria.weight import Random, Weight
from secateur.running.goals import Detection, Goal, NextToken, Regression, Segmentation, Similarity

__all__ = [
    "LRP",
    "Accumulator",
    "Activation",
    "Captum",
    "Criterion",
    "Custom",
    "Detection",
    "Goal",
    "Gradient",
    "NextToken",
    "Random",
    "Regression",
    "Segmentation",
    "Similarity",
    "Subject",
    "Taylor",
    "Weight",
    "known_criteria",
    "register_criterion",
]
