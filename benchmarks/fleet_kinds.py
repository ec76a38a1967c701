"""The kinds of workers that `benchmarks.fleets` compares, by the published figures of accelerators and models.

An engine of n accelerators of one kind, for a model of P parameters in L layers of width H:

    compute   = 2 P / (n × peak × 0.5)                          per prompt token
    exchange  = 2 L × 2 H × 2 (n - 1) / n bytes / (link × 0.7)  per prompt token, of two sums over all accelerators per layer
    step      = weights / (n × bandwidth × 0.8) + 2 L × 10 µs if n > 1 + 3 ms
    per sequence that decodes: the cache of 4,096 tokens / (n × bandwidth × 0.8)
    KV memory = n × memory × 0.9 - weights

The three factors are usual parts of what the data sheets say; they are the same for all kinds, so prices compare whatever they
are.  Attention's growth with the length of a prompt is left out.  An engine takes no request longer than its KV memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.tools.replay_bench.engine import EngineModel
from headrace.tools.replay_bench.trace import BLOCK_TOKENS

PEAK, LINK, BANDWIDTH = 0.5, 0.7, 0.8  # parts of the published figures that are reached
SUM_S = 10e-6  # least time of a sum over accelerators
STEP_S = 0.003  # of a step, whatever is in it
TYPICAL = 4096  # tokens of a sequence that decodes
MOST_SLOTS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """An accelerator: dense operations per second, bytes, bytes per second, and what it costs for an hour."""

    ops: float
    memory: float
    bandwidth: float
    link: float = 0.0  # bytes per second to the others in its machine, each way
    price: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model: parameters, bytes of each, layers, their width, and bytes of the cache per token."""

    parameters: float
    bytes_each: float
    layers: int
    width: int
    cache: float


@dataclass(frozen=True, slots=True)
class Kind:
    """Workers that are alike. `price`: of one for an hour."""

    name: str
    price: float
    model: EngineModel


# Llama 3.1 of 8 billion parameters in 16 bits, and of 70 billion in 8 bits with a cache in 8 bits.
SMALL = ServedModel(parameters=8.0e9, bytes_each=2, layers=32, width=4096, cache=131_072)
LARGE = ServedModel(parameters=70.6e9, bytes_each=1, layers=80, width=8192, cache=163_840)

# NVIDIA's data sheets, without sparsity. Prices of an hour: those of Mélange (arXiv 2404.14527).
L4 = Accelerator(ops=121e12, memory=24e9, bandwidth=300e9, price=0.70)
A10G = Accelerator(ops=70e12, memory=24e9, bandwidth=600e9, price=1.01)
A100 = Accelerator(ops=312e12, memory=80e9, bandwidth=2039e9, price=3.67)
H100 = Accelerator(ops=989e12, memory=80e9, bandwidth=3350e9, link=450e9, price=7.516)
H100_8BIT = Accelerator(ops=1979e12, memory=80e9, bandwidth=3350e9, link=450e9, price=1.0)  # the price counts accelerators


def make_kind(name: str, model: ServedModel, accelerator: Accelerator, count: int = 1) -> Kind:
    """Make the kind of an engine on `count` accelerators."""
    weights = model.parameters * model.bytes_each
    compute_s = 2 * model.parameters / (count * accelerator.ops * PEAK)
    exchanged = 2 * model.layers * 2 * model.width * 2 * (count - 1) / count
    exchange_s = exchanged / (accelerator.link * LINK) if count > 1 else 0.0
    bandwidth = count * accelerator.bandwidth * BANDWIDTH
    tokens = int((count * accelerator.memory * 0.9 - weights) / model.cache)
    engine = EngineModel(
        blocks=tokens // BLOCK_TOKENS,
        context=tokens,
        slots=max(min(tokens // TYPICAL, MOST_SLOTS), 1),
        prefill_rate=1.0 / (compute_s + exchange_s),
        base_s=weights / bandwidth + (2 * model.layers * SUM_S if count > 1 else 0.0) + STEP_S,
        decode_s=TYPICAL * model.cache / bandwidth,
    )
    return Kind(name, count * accelerator.price, engine)


def kinds_of(name: str) -> tuple[Kind, ...]:
    """Return a set of kinds by its name: `parallel` or `accelerators`."""
    if name == "parallel":
        return tuple(make_kind(f"tp{count}", LARGE, H100_8BIT, count) for count in (2, 4, 8))
    named = {"l4": L4, "a10g": A10G, "a100": A100, "h100": H100}
    return tuple(make_kind(name, SMALL, accelerator) for name, accelerator in named.items())
