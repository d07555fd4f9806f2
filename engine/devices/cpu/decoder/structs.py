"""The structs of `structs.h`, which explains the fields, with `Args` after their names."""

from __future__ import annotations

from ctypes import Structure, c_double, c_float, c_int64, c_void_p


class WeightsArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("values", "bias", "quantized")),
        *((name, c_int64) for name in ("inputs", "outputs", "first")),
        ("multipliers", c_void_p),
    )


class RecurrentArgs(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("number", "group", "interleaved")),
        *((name, c_void_p) for name in ("taps", "bias", "rates", "shifts", "skips")),
        *((name, c_float) for name in ("shortest", "longest")),
        ("norm", c_void_p),
        ("norms_first", c_int64),
        *((name, WeightsArgs) for name in ("gates", "decays", "opening")),
    )


class LatentArgs(Structure):
    _fields_ = (
        ("queries", WeightsArgs),
        ("to_latent", c_void_p),
        ("to_value", c_void_p),
        ("norm_epsilon", c_double),
    )


class ExpertWeightsArgs(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("values", "bias", "quantized")),
        *((name, c_int64) for name in ("words", "scales", "inputs", "outputs")),
    )


class ExpertsArgs(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("count", "chosen", "score")),
        ("router", WeightsArgs),
        *((name, c_void_p) for name in ("exact_router", "preferences")),
        *((name, c_int64) for name in ("groups", "open_groups", "normalizes")),
        *((name, c_float) for name in ("least_sum", "scaling")),
        ("rounds", c_int64),
        *((name, ExpertWeightsArgs) for name in ("first", "second")),
        ("opener", WeightsArgs),
    )


class LayerArgs(Structure):
    _fields_ = (
        ("mixer", c_int64),
        *((name, c_void_p) for name in ("input_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, c_void_p) for name in ("mixed_norm", "made_norm", "cosines", "sines")),
        *((name, WeightsArgs) for name in ("qkv", "output", "gate_up", "down")),
        ("window", c_int64),
        *((name, c_void_p) for name in ("recurrent", "latent", "experts")),
        ("beside", c_int64),
        ("input_multiplier", c_double),
    )


class EntryArgs(Structure):
    _fields_ = (
        ("token_norm", c_void_p),
        ("hidden_norm", c_void_p),
        ("joint", WeightsArgs),
        ("mixing", WeightsArgs),
        ("normed_goes_on", c_int64),
        ("feeds_normed", c_int64),
        ("token_ids", c_void_p),
    )


class ModelArgs(Structure):
    _fields_ = (
        ("layers", c_void_p),
        *((name, c_int64) for name in ("num_layers", "num_beside", "hidden", "num_heads", "head_dim")),
        *((name, c_int64) for name in ("vocab", "products")),
        ("embeddings", c_void_p),
        ("final_norm", c_void_p),
        ("head", WeightsArgs),
        *((name, c_int64) for name in ("rotary_dim", "opens_heads", "norms", "activation")),
        ("norm_epsilon", c_double),
        ("attention_scale", c_double),
        *((name, c_double) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
        *((name, c_void_p) for name in ("attention", "tables")),
        ("num_tables", c_int64),
        *((name, c_void_p) for name in ("linear", "quantized_linear")),
        *((name, c_void_p) for name in ("routed_linear", "routed_quantized_linear", "begin", "attend")),
        *((name, c_void_p) for name in ("parallel", "entry", "gather", "ranks", "adapt")),
        *((name, c_void_p) for name in ("state_slots", "convolve", "attend_linear")),
    )


class RowsArgs(Structure):
    _fields_ = (
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("count", c_int64),
        ("logit_rows", c_void_p),
        ("num_logits", c_int64),
        ("logits", c_void_p),
        ("hidden_layers", c_void_p),
        ("num_hidden", c_int64),
        ("hidden", c_void_p),
        ("before", c_void_p),
        ("after", c_void_p),
        ("owners", c_void_p),
        ("adapters", c_void_p),
        ("num_adapters", c_int64),
        ("spans", c_void_p),
    )


class BatchArgs(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_sequences", "table_stride", "block_size")),
        *((name, c_void_p) for name in ("token_ids", "starts", "ends", "block_table", "first_key")),
    )


class DraftArgs(Structure):
    _fields_ = (
        ("batch", BatchArgs),
        ("vocab", c_int64),
        *((name, c_void_p) for name in ("counts", "seeds", "temperatures", "before", "drafted")),
        ("distributions", c_void_p),
        ("width", c_int64),
    )
