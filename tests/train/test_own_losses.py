"""Losses of models of transformers that are no mean over the labels other than -100."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lezero.core.errors import ConfigError
from lezero.train.counting import Counter
from lezero.train.engine import Engine

hf = pytest.importorskip("transformers")


def segformer(kind=hf.SegformerForSemanticSegmentation, classes=300):
    torch.manual_seed(0)
    sizes = {"hidden_sizes": [8, 8], "depths": [1, 1], "num_attention_heads": [1, 1]}
    parts = {"num_encoder_blocks": 2, "sr_ratios": [1, 1], "patch_sizes": [3, 3], "strides": [2, 2]}
    config = hf.SegformerConfig(
        **sizes, **parts, mlp_ratios=[1, 1], decoder_hidden_size=8, num_labels=classes,
        hidden_dropout_prob=0.0, classifier_dropout_prob=0.0, drop_path_rate=0.0,
    )  # fmt: skip
    return kind(config).eval()


@pytest.mark.parametrize("classes", [300, 1])  # of one class the mean is over all pixels
def test_pixels_that_a_models_own_loss_leaves_out_do_not_count(classes):
    pixels, labels = torch.randn(4, 3, 16, 16), torch.randint(min(3, 2 * classes), (4, 16, 16))
    labels[:2, 1:] = 255  # almost nothing of the first micro-batch
    made = []
    for accumulate in (1, 2):
        model = segformer(classes=classes)
        model.decode_head.batch_norm = nn.Identity()  # would see other batches
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine = Engine(model, optimizer, precision="fp32", accumulate=accumulate, compile="off")
        found = engine.train_step({"pixel_values": pixels, "labels": labels})
        assert found.tokens == (labels.numel() if classes == 1 else (labels != 255).sum())
        made.append((found.loss, nn.utils.parameters_to_vector(model.parameters()).detach()))
    (loss, weights), (same_loss, same_weights) = made
    assert loss == pytest.approx(same_loss, rel=1e-5)
    torch.testing.assert_close(weights, same_weights)


def test_a_module_of_ones_own_with_such_a_name_is_counted_as_any():
    class UNetForSemanticSegmentation(nn.Linear):
        pass

    class MineForCTC(nn.Linear):
        pass

    for kind in (UNetForSemanticSegmentation, MineForCTC):
        assert Counter("tokens", kind(2, 2))({"labels": torch.tensor([255, 3, -100])}) == 2


def test_a_model_with_a_loss_of_its_own_around_such_a_model_is_counted_as_any():
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    labels = {"labels": torch.tensor([[[255, 3, -100]]])}
    inner = segformer()
    assert Counter("tokens", Around(inner))(labels) == 2
    assert Counter("tokens", nn.DataParallel(nn.Sequential(inner)))(labels) == 2
    assert Counter("tokens", inner)({"labels": torch.tensor([[[255, 3, 4]]])}) == 2
    adapted = type("PeftModel", (nn.Module,), {"__module__": "peft.peft_model"})
    model = type("FSDPPeftModel", (adapted,), {"__module__": "torch.distributed.fsdp"})()
    model.base_model = inner
    assert Counter("tokens", model)({"labels": torch.tensor([[[255, 3, 4]]])}) == 2


def test_a_class_of_images_is_counted_whatever_its_number():
    labels = torch.tensor([255, 3])
    for model in (segformer(hf.SegformerForImageClassification), None):
        assert Counter("tokens", model)({"labels": labels}) == 2


def test_a_ctc_loss_is_counted_in_samples_where_it_is_a_mean():
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    convolutions = {"conv_dim": [8], "conv_kernel": [4], "conv_stride": [4], "vocab_size": 9}
    config = hf.Wav2Vec2Config(
        **sizes, **convolutions, intermediate_size=8, num_conv_pos_embedding_groups=1,
        num_conv_pos_embeddings=4, num_feat_extract_layers=1, feat_extract_norm="layer",
    )  # fmt: skip
    model = nn.Sequential(hf.Wav2Vec2ForCTC(config))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    batch = {"labels": torch.tensor([[1, 2, 3], [1, -100, -100]])}
    with pytest.raises(ConfigError, match=r"counted: .* a sum .*ctc_loss_reduction = 'mean'"):
        Engine(model, optimizer)
    assert Engine(model, optimizer, counted="samples").count(batch) == 2
    config.ctc_loss_reduction = "mean"
    counter = Engine(model, optimizer).count
    assert not counter.must_ask(batch)
    assert counter(batch) == 2
    config.ctc_loss_reduction = "sum"
    assert Engine(model, optimizer, loss=lambda m, b: m(b).mean()).count.counted == "auto"


def test_a_loss_with_gradients_of_its_own_is_told_that_the_shift_cannot_be_found_out():
    model = nn.Linear(3, 1)

    def loss(model, batch):
        x = batch["x"].requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    engine = Engine(model, torch.optim.SGD(model.parameters(), lr=0.0), loss=loss, compile="off")
    with pytest.raises(
        ConfigError, match="counted: whether the model shifts 'labels' by one could"
    ):
        engine.train_step({"x": torch.ones(2, 3), "labels": torch.ones(2, 4, dtype=torch.long)})
