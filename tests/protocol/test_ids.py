"""Block identities are the same in every process at all times."""

from protocol.ids import (
    block_identities,
    child_identity,
    new_incarnation,
    new_request_id,
    root_identity,
    token_ids_digest,
)

TOKENS = [*range(40), 2**31 - 1, 151_935, 0, 0, 7, 7, 7, 7]
CHAIN = [
    "7f39ac7db99274fa03797b9374f59df8",
    "45821f138dce5ac16cf561f5fd130509",
    "ca7ed322d00d187383b9c804ddd41fa0",
]
ROOT = "f0e8ebc9f3e94588781ed44fe6aaf33e"
DIGEST = "ec6ab2e0e9ec4853bdabf150217f05e6"


def test_a_known_chain():
    """This value must never change, or blocks cached by older processes would not be found."""
    root = root_identity("tandem-code-10m", "bfloat16", "salt")
    assert root.hex() == ROOT
    assert [identity.hex() for identity in block_identities(root, TOKENS, 16)] == CHAIN
    assert token_ids_digest(TOKENS).hex() == DIGEST


def test_a_partial_block_has_no_identity():
    root = root_identity("m", "f")
    assert list(block_identities(root, list(range(15)), 16)) == []
    two = list(block_identities(root, list(range(33)), 16))
    assert len(two) == 2
    assert two == list(block_identities(root, list(range(40)), 16))[:2]


def test_everything_that_distinguishes_blocks_changes_the_identity():
    roots = {
        root_identity("m", "f"),
        root_identity("m", "f", "s"),
        root_identity("m", "g"),
        root_identity("n", "f"),
        root_identity("mf", ""),
        root_identity("", "mf"),
        root_identity("m", "", "f"),
        root_identity("m", "f", adapter="s"),
        root_identity("m", "f", "s", adapter="a"),
        root_identity("m", "f", "s", adapter="b"),
    }
    assert len(roots) == 10
    root = root_identity("m", "f")
    assert child_identity(root, [1, 2]) != child_identity(root, [2, 1])
    assert child_identity(root, [1, 2]) != child_identity(child_identity(root, [1]), [2])
    assert child_identity(root, [256]) != child_identity(root, [0, 1])
    assert all(len(identity) == 16 for identity in roots)


def test_fresh_ids_do_not_repeat():
    assert len({new_incarnation() for _ in range(1000)} | {new_request_id("r") for _ in range(1000)}) == 2000
