from __future__ import annotations

import pytest

nn = pytest.importorskip("torch.nn", reason="needs the extra torch")
blocks = pytest.importorskip("alpa.torch.blocks", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")


def test_the_elements_of_a_list_are_blocks() -> None:
    names = ("blocks.0", "blocks.1", "blocks.2")
    assert blocks.find_blocks(models.GPT(layers=3)) == names


def test_lists_of_one_class_are_one_list() -> None:
    """The stem's modules have classes of their own, and shapes may differ."""
    assert blocks.find_blocks(models.ResNet()) == ("layer1.0", "layer2.0")


def test_lists_in_lists_and_dictionaries_are_entered() -> None:
    def block() -> nn.Module:
        return models.Block(8, 2, 0.0)

    body = nn.Sequential(nn.Sequential(block(), nn.ReLU()), nn.Sequential(nn.LayerNorm(8), block()))
    module = nn.ModuleDict({"stem": nn.LayerNorm(8), "body": body})
    assert blocks.find_blocks(module) == ("body.0.0", "body.1.1")


def test_two_classes_are_both_blocks() -> None:
    encoder = nn.ModuleList(nn.TransformerEncoderLayer(8, 2) for _ in range(2))
    decoder = nn.ModuleList(nn.TransformerDecoderLayer(8, 2) for _ in range(2))
    found = blocks.find_blocks(nn.ModuleDict({"encoder": encoder, "decoder": decoder}))
    assert found == ("encoder.0", "encoder.1", "decoder.0", "decoder.1")


def test_layers_of_an_mlp_are_blocks_if_there_are_no_larger_ones() -> None:
    mlp = nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU()
    )
    assert blocks.find_blocks(mlp) == ("0", "3")


def test_a_subclass_of_a_list_is_a_block() -> None:
    class Pair(nn.Sequential):
        pass

    module = nn.Sequential(Pair(nn.Linear(8, 8), nn.ReLU()), Pair(nn.Linear(8, 8), nn.ReLU()))
    assert blocks.find_blocks(module) == ("0", "1")


@pytest.mark.parametrize(
    "module",
    [
        nn.Linear(8, 8),
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        nn.Sequential(nn.ReLU(), nn.ReLU()),
    ],
    ids=["no list", "each class once", "no parameters"],
)
def test_others_have_no_blocks(module: nn.Module) -> None:
    assert blocks.find_blocks(module) == ()
