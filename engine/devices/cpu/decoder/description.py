"""The packing of a program into the native decoder's structs."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engine.devices.cpu.decoder.native_model import (
    ExpertsArgs,
    ExpertWeightsArgs,
    HeadInputArgs,
    LatentArgs,
    LayerArgs,
    LayerPaths,
    ModelArgs,
    NativeModel,
    RecurrentArgs,
    WeightsArgs,
)
from engine.kv.state_slots import GRID
from engine.linear.experts import RoutedLinear, RoutedQuantizedLinear, pack_experts
from engine.linear.packed_quantized import PackedQuantizedLinear, PackedWeight
from engine.model.program import (
    Activation,
    Attention,
    Experts,
    HeadInput,
    LatentAttention,
    Layer,
    Mixer,
    MixerKind,
    Mlp,
    ModelProgram,
    Norm,
    NormKind,
    Product,
    Recurrent,
    Rotation,
)

_ACTIVATIONS = {
    (Activation.SILU, True),
    (Activation.GELU_TANH, True),
    (Activation.CLAMPED_SWIGLU, True),
    (Activation.RELU2, False),
}
"""Supported activations, each with whether it is gated."""


_ROWS = 1 << 12
"""Embeddings compared at a time, to save memory."""


def unfit(program: ModelProgram) -> str | None:
    """Return why the native decoder can't run the program, or None."""
    if program.logits_cap:
        return "it caps logits"
    for number, layer in enumerate(program.layers):
        if layer.token_input is not None or layer.multiplier is not None:
            return f"layer {number} has a residual of the token or a factor of its output"
        for mixer in layer.mixers:
            if isinstance(mixer, Attention) and (mixer.sides < 2 or mixer.value_norm is not None):
                return f"layer {number} norms values or takes them from keys or another layer"
            reach = mixer.taps.shape[1] if isinstance(mixer, Recurrent) else 0
            if reach > GRID + 1:
                return f"layer {number} has a convolution of {reach} tokens, of at most {GRID + 1}"
        for mlp in _mlps(layer):
            if (mlp.activation, mlp.is_gated) not in _ACTIVATIONS:
                return f"layer {number} has an activation that it does not know"
        if not all(map(_can_join, layer.products())):
            return f"layer {number} has products of one input that are quantized in several ways"
    return None


def unfit_head(program: ModelProgram) -> str | None:
    """Return why the native decoder can't run a draft head's program, or None."""
    if program.embedding_multiplier != 1:
        return "it scales embeddings"
    (lm_head,) = program.head.linears
    if not isinstance(lm_head, nn.Linear | PackedQuantizedLinear):  # the target may have packed its own
        return f"its head is a {type(lm_head).__name__}"
    return unfit(program)


def _can_join(product: Product) -> bool:
    linears = product.linears
    packed = [linear.packed for linear in linears if isinstance(linear, PackedQuantizedLinear)]
    alike = all(part.is_like(packed[0]) for part in packed)
    with_bias = [getattr(linear, "bias", None) is not None for linear in linears]
    return len(packed) in (0, len(linears)) and alike and len(set(with_bias)) <= 1


class Description(NativeModel):
    """A packed program for the CPU, in one of `DTYPES`, for which `unfit` returns None. `positions` is the
    maximum. `free` is called with each layer's number once its weights are packed.
    """

    def __init__(
        self, program: ModelProgram, positions: int, free: Callable[[int], object] = lambda number: None
    ) -> None:
        super().__init__(program.embeddings.dtype)
        self._recurrent: list[RecurrentArgs] = []
        self._latent: list[LatentArgs] = []
        self._head_products: list[ctypes.Array[WeightsArgs]] = []
        self._norms: set[tuple[NormKind, float]] = set()
        self._rotations: dict[Rotation, tuple[Tensor, Tensor]] = {}
        self._positions = positions
        by_layer = []
        for number, layer in enumerate(program.layers):
            by_layer.append(self._take(layer))
            free(number)
        self._set_layers([*itertools.chain(*zip(*by_layer, strict=True))], len(by_layer))
        head = self._product(program.head)
        self.coded_embeddings = self._coded(program.embeddings, head)
        """The head, if its weights are the embeddings: they then have no other memory here."""
        in_codes = self.coded_embeddings is not None
        self.model = ModelArgs(
            layers=ctypes.addressof(self.layers),
            num_layers=len(by_layer),
            num_beside=len(self.layers) - len(by_layer),
            hidden=program.hidden_size,
            vocab=head.outputs,
            embeddings=None if in_codes else self.keep(program.embeddings),
            coded_embeddings=head.quantized if in_codes else None,
            final_norm=self._norm(program.final_norm),
            head=head,
            activation=next((mlp.activation for layer in program.layers for mlp in _mlps(layer)), 0),
            embedding_multiplier=_unless_one(program.embedding_multiplier),
            residual_multiplier=_unless_one(program.residual_multiplier),
            logits_scaling=_unless_one(program.logits_divisor),
            **self._attention_fields(program),
        )
        ((self.model.norms, self.model.norm_epsilon),) = self._norms
        if program.entry is not None:
            self._entry = self._entry_args(program.entry)
            self.model.entry = ctypes.addressof(self._entry)
        self.count_products()

    def _coded(self, embeddings: Tensor, head: WeightsArgs) -> PackedWeight | None:
        """Return the head's weight if its codes are exactly the embeddings."""
        if head.quantized is None:
            return None
        weight, _ = self.kept_quantized(head.quantized)
        if (
            self.dtype is not torch.bfloat16
            or not weight.is_table()
            or len(embeddings) != weight.out_features
        ):
            return None
        parts = zip(itertools.count(0, _ROWS), embeddings.split(_ROWS), strict=False)
        equal = all(torch.equal(weight.bfloat16_rows(at, at + len(part)), part) for at, part in parts)
        return weight if equal else None

    def _set_layers(self, packed: Sequence[tuple[LayerArgs, LayerPaths]], count: int) -> None:
        """Set the layers: first the `count` consecutive layers, then their second mixers."""
        self.layers = (LayerArgs * len(packed))(*(args for args, _ in packed))
        self.paths = [paths for _, paths in packed]
        for number in range(count, len(packed)):
            self.layers[number - count].beside = number

    def _attention_fields(self, program: ModelProgram) -> dict[str, Any]:
        mixers = itertools.chain.from_iterable(layer.mixers for layer in program.layers)
        first = next(mixer for mixer in mixers if isinstance(mixer, Attention | LatentAttention))
        return {
            "num_heads": first.heads,
            "head_dim": first.head_dim,
            "attention_scale": first.scale,
            "rotary_dim": max((table.shape[1] for table, _ in self._rotations.values()), default=0),
            "opens_heads": isinstance(first, Attention) and first.is_gated,
        }

    def _norm(self, norm: Norm | None) -> int | None:
        if norm is None:
            return None
        self._norms.add((norm.kind, norm.epsilon))
        return self.keep(norm.weight)

    def _take(self, layer: Layer) -> list[tuple[LayerArgs, LayerPaths]]:
        """Pack a layer into one entry for each mixer, or one without a mixer."""
        args = LayerArgs(mixer=MixerKind.NOTHING)
        rest: LayerPaths = ((), (), ())
        if layer.mlp is not None:
            args.gate_up, args.down = self._product(layer.mlp.gate_up), self._product(layer.mlp.down)
            rest = (layer.mlp.gate_up.paths, layer.mlp.down.paths, ())
        if layer.experts is not None:
            args.experts = self.keep_experts(self._experts_args(layer.experts))
            shared_gate = layer.experts.shared_gate
            rest = (*rest[:2], () if shared_gate is None else shared_gate.paths)
        args.input_norm, args.mlp_norm = self._norm(layer.input_norm), self._norm(layer.mlp_norm)
        args.mixed_norm, args.made_norm = self._norm(layer.mixed_norm), self._norm(layer.made_norm)
        if not layer.mixers:
            return [(args, ((), (), (), *rest))]
        second = LayerArgs(input_norm=args.input_norm)
        packed = zip((args, second), layer.mixers, (rest, ((), (), ())), strict=False)
        return [(self._mixer(own, mixer), (*_mixer_paths(mixer), *paths)) for own, mixer, paths in packed]

    def _mixer(self, args: LayerArgs, mixer: Mixer) -> LayerArgs:
        args.mixer, args.input_multiplier = mixer.kind, _unless_one(mixer.input_multiplier)
        args.qkv, args.output = self._product(mixer.inputs), self._product(mixer.output)
        if isinstance(mixer, Attention):
            args.query_norm, args.key_norm = self._norm(mixer.query_norm), self._norm(mixer.key_norm)
            args.window, args.sinks = mixer.window, self.keep_floats(mixer.sinks)
            args.cosines, args.sines = self._rotation(mixer.rotation)
        elif isinstance(mixer, LatentAttention):
            args.key_norm = self.keep(mixer.key_norm.weight)
            args.query_norm = self.keep(None if mixer.query_norm is None else mixer.query_norm.weight)
            args.cosines, args.sines = self._rotation(mixer.rotation)
            args.latent = self._latent_args(mixer)
        else:
            assert isinstance(mixer, Recurrent)
            args.recurrent = self._recurrent_args(mixer)
        return args

    def _rotation(self, rotation: Rotation | None) -> tuple[int | None, int | None]:
        """Return the addresses of the rotation's cosines and sines."""
        if rotation is None:
            return None, None
        if rotation not in self._rotations:
            self._rotations[rotation] = rotation.tables(self._positions, torch.zeros(1, dtype=self.dtype))
        cosines, sines = self._rotations[rotation]
        return self.keep(cosines), self.keep(sines)

    def _latent_args(self, mixer: LatentAttention) -> int:
        args = LatentArgs(
            to_latent=self._of_heads(mixer.to_latent.weight),
            to_value=self._of_heads(mixer.to_value.weight),
            norm_epsilon=mixer.key_norm.epsilon,
            in_pairs=mixer.in_pairs,
        )
        if mixer.queries is not None:
            args.queries = self.weights(mixer.queries)
        self._latent.append(args)
        return ctypes.addressof(args)

    def _of_heads(self, weights: Any) -> int:
        heads = (WeightsArgs * len(weights))(*map(self.matrix, weights))
        self._head_products.append(heads)
        return ctypes.addressof(heads)

    def _recurrent_args(self, mixer: Recurrent) -> int:
        args = RecurrentArgs(
            number=mixer.number,
            group=mixer.group,
            interleaved=mixer.is_interleaved,
            taps=self.keep_floats(mixer.taps.t()),
            bias=self.keep_floats(mixer.bias),
            rates=self.keep_floats(mixer.rates),
            shifts=self.keep_floats(mixer.shifts),
            skips=self.keep_floats(mixer.skips),
            shortest=mixer.shortest,
            longest=mixer.longest,
            norm=self.keep(None if mixer.norm is None else mixer.norm.weight),
            norms_first=mixer.norms_first,
        )
        if mixer.gates is not None:
            args.gates = self._product(mixer.gates)
        if mixer.decays is not None:
            args.decays, args.opening = self.weights(mixer.decays), self.weights(mixer.opening)
        self._recurrent.append(args)
        return ctypes.addressof(args)

    def _product(self, product: Product) -> WeightsArgs:
        args = self.weights(*product.linears)
        args.multipliers = self.keep_floats(product.multipliers)
        return args

    def _experts_args(self, experts: Experts) -> ExpertsArgs:
        pack_experts(experts.holder)
        first, second = experts.holder.experts.first, experts.holder.experts.second
        args = ExpertsArgs(
            count=len(experts.router),
            chosen=experts.chosen,
            score=experts.score,
            preferences=self.keep_floats(experts.preferences),
            groups=experts.groups,
            open_groups=experts.open_groups,
            normalizes=experts.normalizes,
            least_sum=experts.least_sum,
            scaling=experts.scaling,
            rounds=experts.rounds,
            first=self._expert_weights(first),
            second=self._expert_weights(second),
        )
        if experts.is_exact:
            args.exact_router = self.keep_floats(experts.router)
        else:
            args.router = self.matrix(experts.router, experts.router_bias)
        if experts.shared_gate is not None:
            args.shared_gate = self._product(experts.shared_gate)
        return args

    def _expert_weights(self, linear: RoutedLinear | RoutedQuantizedLinear) -> ExpertWeightsArgs:
        bias, outputs = self.keep(linear.bias), linear.out_features
        if isinstance(linear, RoutedLinear):
            values = self.hold(linear.weight)
            return ExpertWeightsArgs(values.data_ptr(), bias, inputs=2 * values.shape[2], outputs=outputs)
        for name in ("words", "scales", "minima", "inputs"):
            each = getattr(linear, name)
            setattr(linear, name, None if each is None else self.hold(each))
        first = linear.first()
        words, scales = linear.words[0, 0].numel(), linear.scales[0, 0].numel()
        address = self.keep_experts(first)
        return ExpertWeightsArgs(None, None, address, words, scales, first.in_features, outputs)

    def _entry_args(self, entry: HeadInput) -> HeadInputArgs:
        token_ids = None if entry.token_ids is None else self.hold(entry.token_ids)
        args = HeadInputArgs(
            token_norm=self._norm(entry.token_norm),
            hidden_norm=self._norm(entry.hidden_norm),
            normed_goes_on=entry.normed_goes_on,
            feeds_normed=entry.feeds_normed,
            token_ids=None if token_ids is None else token_ids.data_ptr(),
        )
        if entry.joint is not None:
            args.joint = self.weights(entry.joint)
        if entry.mixing is not None:
            args.mixing = self.weights(entry.mixing)
        return args


def _mlps(layer: Layer) -> list[Mlp | Experts]:
    return [mlp for mlp in (layer.mlp, layer.experts) if mlp is not None]


def _mixer_paths(mixer: Mixer) -> LayerPaths:
    gates = mixer.gates if isinstance(mixer, Recurrent) else None
    return mixer.inputs.paths, () if gates is None else gates.paths, mixer.output.paths


def _unless_one(factor: float) -> float:
    """Return the structs' form of a factor, in which 0 means 1."""
    return 0.0 if factor == 1 else factor
