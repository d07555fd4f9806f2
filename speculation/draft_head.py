"""The contract of a head that drafts from the target's hidden states, whatever checkpoint it comes from."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from engine.batch.runner import Runner
from engine.devices.loaded_model import LoadedModel
from engine.kv.attention import AttentionBackend
from engine.kv.layout import Group
from protocol.config import ServeConfig


class DraftHead(ABC):
    """A decoder layer over pairs of a token and the target's hidden state before it.

    It reads the target's `hidden_layers`, numbered as in Transformers' `hidden_states`, all of them together
    `feature_size` wide, and keeps its KV in `kv_group`. `draft_ids` [draft_vocab_size], int64, are the
    target's ids of the tokens that it can draft, None if it can draft all.
    """

    hidden_layers: tuple[int, ...]
    feature_size: int
    kv_group: Group
    draft_ids: Tensor | None = None
    mixes_in_program = False
    """Whether a native runner takes features [rows, feature_size] without `combine`."""

    def combine(self, features: Tensor) -> Tensor:
        """From the target's hidden states [..., feature_size] to what a row takes [..., hidden_size]."""
        return features

    @abstractmethod
    def runner(self, config: ServeConfig, target: LoadedModel, backend: AttentionBackend) -> Runner:
        """Return what runs the head over the pool of `backend`. To be called once."""
