"""Runs one rank's share of a model over its heads' part of the worker's pool."""

from __future__ import annotations

from dataclasses import replace

from engine.batch.runner import Fill, ForwardOutput, Runner, Step
from engine.devices.attention import select_backend
from engine.devices.attention_tables import backend_over
from engine.devices.loaded_model import LoadedModel
from engine.errors import UnsupportedModelError
from engine.kv.layout import TARGET
from engine.kv.pool import KVPool
from engine.load.select import build_runner
from engine.parallel.decoder import DescriptionShare
from engine.parallel.group import Ranks
from engine.parallel.heads import Heads, OwnHeads, own_heads
from engine.parallel.layers import model_share
from protocol.config import ServeConfig


class ShareRunner:
    """One rank's part of a forward. All ranks of the worker must run the same rows at the same time.

    Each looks at its own heads of the same pool: it has the layout that it has with one rank, so that blocks
    move, are cached and freed without regard to how many ranks there are on either side.
    """

    any_threads = can_fill = False

    def __init__(
        self,
        config: ServeConfig,
        loaded: LoadedModel,
        pool: KVPool,
        ranks: Ranks,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        """Raises UnsupportedModelError where the model's heads can't be divided among so many ranks."""
        self._ranks = ranks
        heads = _share_heads(loaded, ranks)
        layers = [
            layer.of_heads(slice(own.keys.start, own.keys.stop))
            for layer, own in zip(pool.layers(TARGET), heads, strict=True)
        ]
        backend_class, _ = select_backend(loaded.device, loaded.dtype, config.attention_backend)
        backend = backend_over(backend_class, layers, pool.groups[TARGET])
        if loaded.description is not None:
            share = replace(loaded, description=DescriptionShare(loaded.description, heads[0], ranks))
        else:
            share = replace(loaded, model=model_share(loaded.model, ranks))
            backend = OwnHeads(backend, heads, ranks)
        # Not compiled: torch.compile knows nothing of exchanges.
        self._runner: Runner = build_runner(share, backend, "off", hidden_layers)
        self.products = self._runner.products
        self.choice = f"{self._runner.choice}, on {ranks.size} ranks"

    @property
    def deterministic(self) -> bool:
        return self._runner.deterministic

    def warm_up(self) -> float:
        return self._runner.warm_up()

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        """As `Runner.run`. Raises LostRankError."""
        output = self._runner.run(step)
        self._ranks.check()
        return output


def _share_heads(loaded: LoadedModel, ranks: Ranks) -> list[Heads]:
    """Return this rank's heads of each layer."""
    group = loaded.kv_group
    queries = loaded.model.config.get_text_config(decoder=True).num_attention_heads
    if queries % ranks.size:
        model = loaded.model.config.model_type
        raise UnsupportedModelError(
            f"{model}: {queries} attention heads cannot be divided among {ranks.size} tensor-parallel ranks"
        )
    keys = [group.segments[place.segment].num_kv_heads for place in group.layers]
    return [own_heads(queries, count, ranks) for count in keys]
