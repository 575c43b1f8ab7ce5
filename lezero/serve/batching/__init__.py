"""Dynamic batching that tunes itself, for models that answer in one pass.

Policy, without tensors or clocks of its own: `curve.py` learns how long a step takes, `plan.py`
rehearses arrivals in virtual time and picks the batch and the delay, `batcher.py` holds the queue
and says what runs next. What it is for: `model.py` is the extension point, `encoder.py` and
`module.py` are its members, `runner.py` runs one in a thread.
"""
