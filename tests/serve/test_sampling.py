import numpy as np
import pytest
import torch

from lezero.core.errors import ConfigError
from lezero.serve import SamplingParams


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"max_tokens": 0}, "max_tokens: got 0"),
        ({"temperature": -0.1}, "temperature: got -0.1"),
        ({"temperature": float("nan")}, "temperature: got nan"),
        ({"top_k": 0}, "top_k: got 0"),
        ({"top_p": 0.0}, "top_p: got 0.0"),
        ({"min_p": 1.5}, "min_p: got 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty: got 0.0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty: got 1e-300"),
        ({"repetition_penalty": 1e300}, "repetition_penalty: got 1e"),
        ({"stop_token_ids": [5] * 257}, "at most 256"),
        ({"presence_penalty": 2.5}, "presence_penalty: got 2.5"),
        ({"frequency_penalty": -3.0}, "frequency_penalty: got -3.0"),
        ({"seed": -1}, "seed: got -1"),
        ({"seed": 1 << 63}, "seed: got"),
        ({"stop": ("",)}, "stop.0: got ''"),
        ({"stop": ("x",) * 17}, "stop: got"),
        ({"stop_token_ids": (-1,)}, "stop_token_ids.0: got -1"),
        ({"logprobs": 21}, "logprobs: got 21"),
        ({"logprobs": True}, "logprobs: got True"),
        ({"temperature": "1"}, "temperature: got '1'"),
        ({"top_k": "5"}, "top_k: got '5'"),
        ({"top_k": 5.0}, "top_k: got 5.0"),
        ({"ignore_eos": 1}, "ignore_eos: got 1"),
        ({"ignore_eos": "yes"}, "ignore_eos: got 'yes'"),
        ({"stop_token_ids": ["5"]}, "stop_token_ids.0: got '5'"),
        ({"stop_token_ids": [5.0]}, "stop_token_ids.0: got 5.0"),
        ({"stop": [5]}, "stop.0: got 5"),
        ({"temprature": 1.0}, "did you mean 'temperature'"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SamplingParams(**change)


def test_one_stop_string_needs_no_tuple() -> None:
    assert SamplingParams(stop="\n\n").stop == ("\n\n",)


def test_none_is_none() -> None:
    """vLLM's default."""
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams.parse({"stop": None, "stop_token_ids": None}).to_dict()["stop"] == []


def test_numbers_of_numpy_and_torch_are_what_they_hold() -> None:
    found = SamplingParams(
        seed=np.int64(5),
        temperature=np.float32(0.5),
        ignore_eos=np.True_,
        top_k=torch.tensor(3),
        stop_token_ids=np.array([1, 2]),
    )
    assert (found.seed, found.temperature, found.ignore_eos, found.top_k) == (5, 0.5, True, 3)
    assert found.stop_token_ids == (1, 2)
    assert SamplingParams(stop_token_ids=[np.int64(7)]).stop_token_ids == (7,)
    with pytest.raises(ConfigError, match="seed: got"):
        SamplingParams(seed=np.array([1]))


def test_penalties_are_known() -> None:
    assert not SamplingParams().penalizes
    assert SamplingParams(frequency_penalty=0.1).penalizes
    assert SamplingParams(repetition_penalty=1.1).penalizes
