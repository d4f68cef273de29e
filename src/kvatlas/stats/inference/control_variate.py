"""The screen as a control variate: a mean over all problems from few decoded ones, on arrays.

A screen reads the full cache's traces under every setting without decoding, so what it says of a problem is known of
all problems; the loss is known of those that were decoded. The mean loss is corrected by how much the screen's mean
over the decoded problems differs from its mean over all. It needs no assumption about the screen: one that says nothing
gets no weight.

Source: Angelopoulos et al. (2023), Prediction-powered inference, Science 382:669-674; Angelopoulos, Duchi and Zrnic
(2023), PPI++, arXiv 2311.01453 (the weight).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from kvatlas.core import KvatlasError
from kvatlas.stats.estimates.bounded_mean import Floats


@dataclass(frozen=True)
class Powered:
    """A mean with its 95 % interval. `weight` is the screen's, `worth` how many decoded problems one is worth by it."""

    value: float
    low: float
    high: float
    weight: float
    worth: float


def powered_mean(values: Floats, screened: Floats, decoded: NDArray[np.bool_]) -> Powered:
    """The mean of `values` over problems like all of these, from those that are `decoded`.

    `values` [problems] are in [-1, 1] and read only where `decoded`, `screened` [problems] is known of all. The decoded
    problems must be a random part of all. Student's interval over decoded problems; the weight is the one of least
    variance, estimated. Raises KvatlasError for fewer than three decoded problems or unlike lengths.
    """
    if not len(values) == len(screened) == len(decoded) or int(decoded.sum()) < 3:
        raise KvatlasError("A mean by a screen needs a screen of every problem and at least 3 decoded problems.")
    own, seen = values[decoded], screened[decoded]
    count, every = len(own), len(screened)
    covariance = np.cov(own, seen)
    known = covariance[1, 1] > 1e-12
    # The decoded are part of all problems, so least squares is the weight of least variance.
    weight = float(covariance[0, 1] / covariance[1, 1]) if known else 0.0
    value = float(own.mean() + weight * (screened.mean() - seen.mean()))
    left = own - weight * seen
    explained = weight**2 * float(screened.var(ddof=1))
    variance = float(left.var(ddof=1)) / count * (count - 1) / (count - 2) + explained / every
    half = float(stats.t.ppf(0.975, count - 2)) * math.sqrt(variance)
    plain = float(own.var(ddof=1)) / count
    worth = plain / variance if variance > 1e-18 else 1.0
    return Powered(value, max(-1.0, value - half), min(1.0, value + half), weight, max(worth, 0.0))
