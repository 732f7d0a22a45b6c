"""What the usual run of the tests leaves out: tests/rare.txt names what there is."""

from support.jobs import ROOT


def test_every_function_that_is_named_exists():
    lines = (ROOT / "tests/rare.txt").read_text().splitlines()
    rows = [line.split(" ") for line in lines if line and not line.startswith("#")]
    assert len({place for _, place in rows}) == len(rows) > 30
    for every, place in rows:
        file, _, function = place.partition("::")
        assert int(every) != 1, place
        assert f"def {function}(" in (ROOT / "tests" / file).read_text(), place
