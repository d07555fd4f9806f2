"""Runs one rank's share of a model.

Ranks that share a KV pool run the native decoder over a share of the packed program, or a Transformers model.
Its attention gets all heads, attends with the rank's own, and gathers. Ranks with pools of their own run a
share of the program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from engine.batch.runner import Fill, ForwardOutput, Runner, Step
from engine.devices.attention import backend_for, backend_over
from engine.devices.cuda.tiles import tiling
from engine.devices.loaded_model import LoadedModel, Share
from engine.kv.attention import AttentionBackend, AttentionMetadata, AttentionOptions
from engine.kv.layout import TARGET
from engine.kv.pool import KVPool
from engine.load.select import build_runner, runner_of
from engine.parallel.division import Heads, heads_of, model_share, query_columns
from engine.parallel.group import Columns, DistributedRanks, Ranks, SharedRanks
from engine.parallel.program_share import DescriptionShare, program_share
from protocol.config import ServeConfig
from protocol.errors import UnsupportedModelError
from protocol.speculation import WEIGHTLESS


def share_of(config: ServeConfig, loaded: LoadedModel, ranks: Ranks) -> LoadedModel:
    """Return the loaded model, or this rank's share of it. Raises UnsupportedModelError."""
    model = loaded.model.config.model_type
    queries = _num_queries(loaded)
    if queries % ranks.size:
        raise UnsupportedModelError(
            f"{model}: {queries} attention heads cannot be divided among {ranks.size} tensor-parallel ranks"
        )
    if not isinstance(ranks, DistributedRanks):
        return loaded
    program = loaded.program
    if program is None:
        raise UnsupportedModelError(
            f"{model}: no tensor-parallel ranks with KV pools of their own, as on GPUs, run it: no family "
            "describes it"
        )
    options = config.speculative_config
    if ranks.rank == 0 and options is not None and options.method not in (*WEIGHTLESS, "draft_model"):
        for table in (loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings()):
            table.to(loaded.device)  # draft heads read them whole; the share's parts of them are views
    prepare = tiling(config, loaded.device, loaded.dtype)
    share = program_share(program, ranks, loaded.device, prepare, loaded.adapters)
    return replace(loaded, share=Share(share, ranks.agree))


class ShareRunner:
    """One rank's part of a forward. All ranks of the worker must run the same rows at the same time."""

    any_threads = can_fill = False
    chains = None

    def __init__(
        self,
        config: ServeConfig,
        loaded: LoadedModel,
        pool: KVPool,
        ranks: Ranks,
        hidden_layers: tuple[int, ...] = (),
    ) -> None:
        self._ranks = ranks
        backend_class, _ = backend_for(config, loaded.device, loaded.dtype)
        if isinstance(ranks, SharedRanks):
            # Not compiled: torch.compile does not know the gathers.
            share, backend = _over_shared_pool(loaded, pool, ranks, backend_class)
            self._runner: Runner = build_runner(share, backend, "off", hidden_layers, pool.state_slots)
        else:
            backend = backend_over(backend_class, pool.layers(TARGET), pool.groups[TARGET])
            self._runner = runner_of(config, loaded, backend, hidden_layers, pool.state_slots)
        self.products = self._runner.products

    @property
    def choice(self) -> str:
        return f"{self._runner.choice}, on {self._ranks.size} ranks"

    @property
    def deterministic(self) -> bool:
        return self._runner.deterministic

    def warm_up(self) -> float:
        return self._runner.warm_up()

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        """Run the step on this rank. Raises LostRankError."""
        output = self._runner.run(step)
        self._ranks.check()
        return output


def _over_shared_pool(
    loaded: LoadedModel, pool: KVPool, ranks: SharedRanks, backend_class: type[AttentionBackend]
) -> tuple[LoadedModel, AttentionBackend]:
    """Return this rank's share, and attention over its own heads in the pool. The pool has the same layout as
    with one rank, so blocks are moved, cached and freed regardless of the number of ranks on either side.
    """
    queries, group = _num_queries(loaded), loaded.kv_group
    keys = [group.segments[place.segment].num_kv_heads for place in group.layers]
    heads = [heads_of(queries, count, ranks.size)[ranks.rank] for count in keys]
    layers = [
        layer.of_heads(slice(own.keys.start, own.keys.stop))
        for layer, own in zip(pool.layers(TARGET), heads, strict=True)
    ]
    backend = backend_over(backend_class, layers, pool.groups[TARGET])
    if loaded.description is not None:
        return replace(loaded, description=DescriptionShare(loaded.description, heads[0], ranks)), backend
    columns = [query_columns(queries, count, ranks.size) for count in keys]
    return replace(loaded, model=model_share(loaded.model, ranks)), OwnHeads(backend, heads, columns, ranks)


def _num_queries(loaded: LoadedModel) -> int:
    count: int = loaded.model.config.get_text_config(decoder=True).num_attention_heads
    return count


class OwnHeads(AttentionBackend):
    """Attention for a model that passes all heads: attends with the rank's own heads, and gathers."""

    def __init__(
        self, backend: AttentionBackend, heads: Sequence[Heads], columns: Sequence[Columns], ranks: Ranks
    ) -> None:
        """Attend with `heads` of each layer; `columns` has each layer's attention heads on all ranks."""
        self.name, self.block_size = backend.name, backend.block_size
        self.num_tables = backend.num_tables
        self._backend = backend
        self._heads = heads
        self._columns = columns
        self._ranks = ranks

    def plan(self, metadata: AttentionMetadata) -> None:
        self._backend.plan(metadata)

    def begin_step(self, metadata: AttentionMetadata) -> None:
        self._backend.begin_step(metadata)

    def forward(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Attend with the rank's heads, and return the outputs of all heads. Raises LostRankError."""
        queries, keys = (slice(heads.start, heads.stop) for heads in self._heads[layer])
        attended = self._backend.forward(
            layer,
            query[:, queries],
            key[:, keys],
            value[:, keys],
            options._replace(sinks=None if options.sinks is None else options.sinks[queries]),
        )
        (rows, count, _), size = query.shape, value.shape[2]
        columns = self._columns[layer].times(size)
        return self._ranks.gather(attended.flatten(1), columns).view(rows, count, size)
