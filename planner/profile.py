"""The speed of a worker and its wires: measured by `tandem profile`, or taken from public figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.costs import StepCosts
from protocol.errors import ConfigError
from protocol.speculation import SpeculationState
from router.placement.interface import LinkSpeed

BUNDLED = Path(__file__).resolve().parent / "profiles"
DEFAULT_PROFILE = "h100-llama-3.1-8b"

_Seconds = Annotated[float, Meta(ge=0)]
_Positive = Annotated[int, Meta(ge=1)]
_Slower = Annotated[float, Meta(ge=1)]


class LinkProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A wire between two workers: seconds per piece, bytes per second."""

    latency_s: _Seconds
    bytes_per_s: Annotated[float, Meta(gt=0)]


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The speed of workers and wires. `costs` are any worker's, whatever its role; `link` is the wire between
    any two.

    A worker has room for the KV of `kv_tokens` tokens in all tables of its pool (`costs.kv_windows`) and runs
    up to `max_num_seqs` sequences in a step, each of which takes room for `least_tokens` or more. A request
    spends `request_s` outside of workers before its first token, and a hand-off `handoff_s` in addition to
    its bytes on the wire. While all other workers work, decoding takes `decode_beside` times as long and
    prefill `prefill_beside` times, since workers of one host share its memory and cores. `speculation` has
    the acceptance and cost of drafts by its first method.
    `sources` names the origin of the figures.
    """

    name: str
    sources: list[str]
    costs: StepCosts
    link: LinkProfile
    kv_tokens: _Positive
    max_num_seqs: _Positive = 64
    least_tokens: Annotated[int, Meta(ge=0)] = 0
    block_size: _Positive = 16
    request_s: _Seconds = 0.0
    handoff_s: _Seconds = 0.0
    decode_beside: _Slower = 1.0
    prefill_beside: _Slower = 1.0
    speculation: SpeculationState | None = None

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in a worker's pool; a token has a block in each table."""
        return self.kv_tokens // self.block_size * len(self.costs.kv_windows)

    @property
    def wire(self) -> LinkSpeed:
        return LinkSpeed(self.link.latency_s, self.link.bytes_per_s)


def read_profile(name: str) -> Profile:
    """Read a file, or a bundled profile by name. Raises `ConfigError` that names the file and the field."""
    path = Path(name)
    if not path.is_file():
        path = BUNDLED / f"{name}.json"
    if not path.is_file():
        bundled = ", ".join(sorted(file.stem for file in BUNDLED.glob("*.json")))
        raise ConfigError(f"--profile: there is no file {name}; bundled are {bundled}")
    try:
        content = path.read_bytes()
        profile = msgspec.json.decode(content, type=Profile)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--profile: {path}: {error}") from error
    unknown = msgspec.json.decode(content)["costs"].keys() - set(StepCosts.__struct_fields__)
    if unknown:
        raise ConfigError(f"--profile: {path}: $.costs: there is no field {min(unknown)}")
    return profile


def write_profile(profile: Profile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
