"""A load holds the rank's weights and little more, in fresh processes, on a model of more than 2 GiB."""

import pytest
import typer

from tests.actor.weights.measure_load import main


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_load_stays_below_weights_plus_largest_tensor_plus_half_a_gib(tmp_path, capsys):
    with pytest.raises(typer.Exit) as ended:
        main(tmp_path)
    assert ended.value.exit_code == 0, capsys.readouterr().out
    assert len(capsys.readouterr().out.splitlines()) == 2 + 5  # a row a rank of one, two and two
