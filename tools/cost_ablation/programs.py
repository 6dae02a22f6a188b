"""The 15 small architectures: five of T5, six convolutional, four of mixture of experts."""

from __future__ import annotations

from alpa.tools.plan_ranking.programs import RankedProgram


def _of(name: str, model: str, **fields: object) -> RankedProgram:
    return RankedProgram(
        name=name, model=model, micro_batch_size=16, num_micro_batches=1, fields=fields
    )


def _t5(name: str, hidden_size: int, mlp_size: int, **fields: object) -> RankedProgram:
    sizes = {"hidden_size": hidden_size, "mlp_size": mlp_size, "num_layers": 1}
    return _of(name, "t5-tiny", **{**sizes, **fields})


def _moe(name: str, hidden_size: int, num_experts: int, **fields: object) -> RankedProgram:
    sizes = {"hidden_size": hidden_size, "num_experts": num_experts, "num_layers": 2}
    return _of(name, "moe-tiny", **{**sizes, **fields})


PROGRAMS = (
    _t5("t5-64", 64, 256),
    _t5("t5-128", 128, 512),
    _t5("t5-128-wide", 128, 2048),
    _t5("t5-256", 256, 1024),
    _t5("t5-128-vocabulary", 128, 512, vocab_size=4096),
    _of("wresnet-8", "wresnet-tiny", stage_sizes=(1, 1)),
    _of("wresnet-16", "wresnet-tiny", stage_sizes=(1, 1), base_channels=16),
    _of("wresnet-32", "wresnet-tiny", stage_sizes=(1, 1), base_channels=32),
    _of("wresnet-8-classes", "wresnet-tiny", stage_sizes=(1, 1), num_classes=16384),
    _of("unet-16", "unet-tiny"),
    _of("unet-32", "unet-tiny", channels=32),
    _moe("moe-64", 64, 4),
    _moe("moe-128", 128, 8),
    _moe("moe-128-16", 128, 16),
    _moe("moe-256", 256, 8),
)
