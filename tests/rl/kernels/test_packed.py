"""The layout of packed tokens, worked out by hand."""

import numpy as np

from scalerl.rl.kernels.packed import Packing


def test_a_packing_by_hand():
    """Two completions of a prompt of three tokens, and one of a prompt of one."""
    token_MT = np.array([[1, 2, 3, 11, 12, 13, 0], [4, 21, 22, 23, 0, 0, 0], [1, 2, 3, 31, 0, 0, 0]])
    wanted = [(0, 3), (0, 5), (1, 1), (1, 2), (2, 3)]  # completion and token; 12 was inserted, 23 as well
    wanted_MT = np.zeros(token_MT.shape, dtype=bool)
    wanted_MT[tuple(np.array(wanted).T)] = True
    packing = Packing.of(token_MT, wanted_MT[:, 1:], np.array([3, 1, 3]), np.array([5, 7, 5]))
    # Prompts, then 11 12 of the first, nothing of the third, and 21 of the second, whose 22 predicts nothing.
    assert packing.token_F.tolist() == [1, 2, 3, 4, 11, 12, 21]
    assert packing.prompt_start_U.tolist() == [0, 3]
    assert packing.prompt_length_U.tolist() == [3, 1]
    assert packing.first_U.tolist() == [0, 2, 3]
    assert packing.start_M.tolist() == [4, 6, 6]
    assert packing.length_M.tolist() == [2, 0, 1]
    assert packing.longest == 5
    # 11 and 31 are predicted at 3, 13 at 12, 21 at 4 and 22 at 21.
    assert packing.token_F[packing.needed_R].tolist() == [3, 4, 12, 21]
    assert packing.token_F[packing.needed_R][packing.row_W].tolist() == [3, 12, 4, 21, 3]
