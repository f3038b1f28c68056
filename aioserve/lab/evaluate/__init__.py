"""Judges a policy file for people and for programs: metrics, a score, and the story of a failure.

`evaluate(path)` is what OpenEvolve and its kin ask of an evaluator. docs/evolve.md says what each
stage does.
"""

from aioserve.lab.evaluate.evaluator import Evaluation, Evaluator, Trials, evaluate

__all__ = ["Evaluation", "Evaluator", "Trials", "evaluate"]
