"""Roles: every rank has exactly one, said in one line otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from spmd_rl.comm.roles import check_roles
from spmd_rl.config.errors import UserError


def test_every_rank_has_one_role() -> None:
    check_roles({"train": [0, 2], "rollout": (3, 1)}, 4)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"train": [0, 1, 2, 3], "rollout": []}, "role 'rollout' has no rank; the job has 4"),
        ({"train": [0, 1, 2], "rollout": [3, 4]}, "role 'rollout': there is no rank 4, the job has ranks 0 to 3"),
        ({"train": [0, 1, 2], "rollout": [2, 3]}, "rank 2 is in role 'train' and in role 'rollout'"),
        ({"train": [0], "rollout": [3]}, "ranks 1, 2 have no role; there are train, rollout"),
    ],
)
def test_what_cannot_be_is_one_line(roles: Mapping[str, Sequence[int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_roles(roles, 4)
