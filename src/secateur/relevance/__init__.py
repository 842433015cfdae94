"""Layer-wise Relevance Propagation: rules, composites, the pass that applies them, heat maps."""

from secateur.relevance.accelerators import Accelerators
from secateur.relevance.attention import Attention
from secateur.relevance.composites import PRESETS, Composite, On, Place
from secateur.relevance.conservation import Conservation, Flow
from secateur.relevance.engine import RelevancePass
from secateur.relevance.explain import Explanation, explain, unit_relevance
from secateur.relevance.linear_maps import LinearMap
from secateur.relevance.rules import AlphaBeta, Box, Epsilon, Flat, Gamma, Norm, Pass, Rule, WSquare, ZPlus

__all__ = [
    "PRESETS",
    "Accelerators",
    "AlphaBeta",
    "Attention",
    "Box",
    "Composite",
    "Conservation",
    "Epsilon",
    "Explanation",
    "Flat",
    "Flow",
    "Gamma",
    "LinearMap",
    "Norm",
    "On",
    "Pass",
    "Place",
    "RelevancePass",
    "Rule",
    "WSquare",
    "ZPlus",
    "explain",
    "unit_relevance",
]
