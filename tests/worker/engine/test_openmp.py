"""No thread spins for long."""

from worker.engine.openmp import limit_spinning


def test_spinning_is_limited_unless_the_user_has_decided() -> None:
    plain: dict[str, str] = {}
    limit_spinning(plain)
    assert int(plain["GOMP_SPINCOUNT"]) > 0
    for chosen in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}):
        environment = dict(chosen)
        limit_spinning(environment)
        assert environment == chosen
