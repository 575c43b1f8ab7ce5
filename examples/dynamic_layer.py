"""A layer whose weights are generated from its input, in a plain PyTorch training loop."""

import torch

import lezero as lz


class CustomLayer(lz.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = lz.nn.Conv2d(3, 64, kernel_size=3)
        self.dynamic_op = lz.nn.DynamicWeightGenerator()

    def forward(self, x):
        x = self.conv(x)
        if self.training and x.shape[1] > 32:
            return x + self.dynamic_op(x)
        return x


def main():
    torch.manual_seed(0)
    layer = CustomLayer()
    images, wanted = torch.randn(8, 3, 12, 12), torch.randn(8, 64, 10, 10)

    try:  # the dynamic layer does not know its channels yet, and says so
        torch.optim.AdamW(layer.parameters())
    except lz.LeZeroError as error:
        print(f"too early: {error}")

    layer(images)  # the first call sizes it
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for step in range(10):
        loss = lz.nn.functional.mse_loss(layer(images), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 3 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
