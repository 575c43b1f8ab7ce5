"""What will training this model take? Asked before anything of it is allocated."""

from lezero.models import Transformer, TransformerConfig
from lezero.plan import StepSpec, forecast
from lezero.plan.table import render


def build() -> Transformer:
    return Transformer(TransformerConfig(vocab=2048, dim=128, layers=4, heads=4, context=128))


made = forecast(build, StepSpec(batch=8, tokens=128, precision="bf16", steps=1000))
print(render(made))
assert made.fits
