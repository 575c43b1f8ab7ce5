import json

import torch

from lezero.checkpoint import environment, environment_difference


def test_the_record_is_json_and_equal_to_itself():
    now = environment()
    assert now["torch"] == torch.__version__
    assert now["world_size"] == 1
    assert now["threads"] == torch.get_num_threads()
    assert environment_difference(json.loads(json.dumps(now)), now) == []


def test_each_difference_that_bits_depend_on_is_named():
    now = environment()
    saved = {**now, "torch": "2.11.0", "world_size": 4, "threads": 9, "cpu": "x", "lezero": "0.0"}
    found = environment_difference(saved, now)
    assert len(found) == 4
    assert f"number of ranks: 4 when saved, {now['world_size']} now" in found
    assert f"torch: 2.11.0 when saved, {torch.__version__} now" in found
