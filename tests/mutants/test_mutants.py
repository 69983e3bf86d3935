"""The tests are worth something: each broken variant of the package fails at least one of them.

The named tests run inside this process, once on the package as it is (all must pass) and once per
variant (one must fail). `pytest tests/mutants` ends with `mutants killed: N/N`.
"""

from __future__ import annotations

from pathlib import Path

import key_variants  # noqa: F401  (fills the list)
import pytest
import replay_variants  # noqa: F401
import shared_variants  # noqa: F401
from variant import VARIANTS, Variant

ROOT = Path(__file__).resolve().parents[2]


class Outcomes:
    """A pytest plugin that keeps what failed and how many tests ran."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.passed = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call" and report.passed:
            self.passed += 1


def _run(tests: tuple[str, ...], *options: str) -> Outcomes:
    outcomes = Outcomes()
    ids = [str(ROOT / test) for test in tests]
    arguments = ["-q", "--no-header", "-p", "no:cacheprovider", "-m", "not gpu", *options, *ids]
    code = pytest.main([f"--rootdir={ROOT}", *arguments], plugins=[outcomes])
    assert code in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"pytest ended with {code}"
    return outcomes


def test_the_tests_pass_on_the_package_as_it_is() -> None:
    tests = dict.fromkeys(test for variant in VARIANTS.values() for test in variant.noticed_by)
    outcomes = _run(tuple(tests))
    assert not outcomes.failed
    assert outcomes.passed >= len(tests)


@pytest.mark.parametrize("name", VARIANTS)
def test_b16_a_broken_variant_is_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, record_property: object
) -> None:
    variant: Variant = VARIANTS[name]
    with monkeypatch.context() as patch:
        variant.apply(patch)
        outcomes = _run(variant.noticed_by, "-x")
    record_property("mutant", "killed" if outcomes.failed else "survived")
    assert outcomes.failed, f"survived: {name}; {outcomes.passed} tests passed under it"


def test_every_line_of_the_list_has_its_variant() -> None:
    """The mistakes the project set out to catch."""
    wanted = (
        "replay does nothing",
        "boundary buffer forgotten",
        "key without dtype",
        "key without stride",
        "key without Python leaves",
        "key without adapters",
        "key without autocast",
        "changed input not bound again",
        "address taken for identity",
        "output not cloned",
        "verify always passes",
        "constant handed back by call order",
        "eviction frees what another graph reads",
        "weak reference to a tensor outside the pool",
        "RNG not repaired",
    )
    for name in wanted:
        assert any(variant.startswith(name) for variant in VARIANTS), name
