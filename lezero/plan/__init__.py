"""Forecasts: what a run will need and take, before anything of it is allocated."""

from lezero.plan.forecast import Forecast, forecast
from lezero.plan.spec import StepSpec

__all__ = ["Forecast", "StepSpec", "forecast"]
